"""Rollouts by vLLM: it is sent what TRL sends it, and the model is never written to. vLLM itself is
played by an object that remembers what it was sent."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import trl.generation.vllm_generation as trls
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaForCausalLM, Qwen3MoeForCausalLM

from roundpipe.errors import ConfigError
from roundpipe.quantized import INT8, QuantizedWeight
from roundpipe_hf.trl import vllm
from roundpipe_hf.trl.vllm import merged_weights, refuse_among
from tests.hf.trl.test_preferences import config, make_model
from tests.hf.trl.test_rollouts import LORA, both, make_one
from tests.support.example_data import save_tokenizer
from tests.support.preset_models import tiny_qwen3_moe
from tests.support.trainers import Pair, assert_same, run

CPU = torch.device("cpu")
EOS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder)
    make_model().save_pretrained(folder)
    return folder


class Sent(list[dict[str, Tensor]]):
    """What arrived in each update, by name. Copies, because a weight is valid only until the next
    one is made."""

    def begin(self) -> None:
        self.append({})

    def take(self, name: str, weight: Tensor) -> None:
        assert name not in self[-1], f"{name} was sent twice"
        self[-1][name] = weight.clone()


def completion(prompt: list[int], place: int) -> list[int]:
    return [4 + (sum(prompt) + 5 * place + step) % 24 for step in range(4)] + [EOS]


class Client:
    """TRL's `VLLMClient`, without a server."""

    made: list["Client"]

    def __init__(self, **_: Any) -> None:
        self.sent = Sent()
        self.made.append(self)

    def init_communicator(self, device: Any) -> None:
        pass

    def get_server_info(self) -> Any:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def update_named_params(self, metadata: Any, named: Any) -> None:
        self.sent.begin()
        for (name, dtype, shape), (sent, weight) in zip(metadata, named, strict=True):
            assert (sent, str(weight.dtype), list(weight.shape)) == (name, f"torch.{dtype}", shape)
            self.sent.take(sent, weight)

    def reset_prefix_cache(self) -> None:
        pass

    def generate(self, prompts: list[list[int]], n: int, **_: Any) -> dict[str, Any]:
        made = [completion(prompt, place) for prompt in prompts for place in range(n)]
        return {
            "prompt_ids": prompts,
            "completion_ids": made,
            "logprobs": [[[-3.0] for _ in tokens] for tokens in made],
            "logprob_token_ids": [[[token] for token in tokens] for tokens in made],
        }


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> list[Client]:
    monkeypatch.setattr(trls, "is_vllm_available", lambda: True)
    monkeypatch.setattr(trls, "VLLMClient", Client)
    monkeypatch.setattr(Client, "made", [], raising=False)
    return Client.made


def assert_sent_alike(ours: Sent, plain: Sent) -> None:
    """The first to the bit: no training has come between."""
    assert len(ours) == len(plain) > 1
    for step, (mine, theirs) in enumerate(zip(ours, plain, strict=True)):
        assert list(mine) == list(theirs)
        for name, weight in theirs.items():
            atol = 0.0 if step == 0 else 1e-5
            torch.testing.assert_close(mine[name], weight, atol=atol, rtol=0.0)
    assert any(not torch.equal(plain[0][name], plain[-1][name]) for name in plain[0])


@both
@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("adapts", [False, True], ids=["all weights", "lora"])
def test_weights_for_a_server(
    kind: str, adapts: bool, devices: int, folder: Path, clients: list[Client]
) -> None:
    """Those of every update, and the training that TRL makes of what comes back."""
    settings: dict[str, Any] = {"use_vllm": True, "vllm_mode": "server", "devices": devices}
    if adapts:
        settings["peft_config"] = LORA
    pair = Pair(*(make_one(kind, is_ours, folder, **settings) for is_ours in (True, False)))
    assert_same(Pair(*map(run, pair)))
    ours, plain = clients
    assert_sent_alike(ours.sent, plain.sent)


@both
def test_an_asynchronous_step_is_waited_for(kind: str, folder: Path, clients: list[Client]) -> None:
    """What is sent last is what the model had when the last step began."""
    settings = {"use_vllm": True, "vllm_mode": "server", "async_optimizer": True, "max_steps": 3}
    trainer = make_one(kind, True, folder, **settings)
    seen, inner = [], trainer.vllm_generation.sync_weights

    def sync_weights() -> None:
        inner()
        seen.append({name: weight.clone() for name, weight in trainer.model.named_parameters()})

    trainer.vllm_generation.sync_weights = sync_weights
    run(trainer)
    for sent, weights in zip(clients[0].sent, seen, strict=True):
        assert all(torch.equal(sent[name], weight) for name, weight in weights.items())


def of_lora(**settings: Any) -> Any:
    given: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "down_proj"]} | settings
    torch.manual_seed(3)
    return get_peft_model(make_model(), LoraConfig(init_lora_weights=False, **given))


def with_two_adapters() -> Any:
    model = of_lora()
    model.add_adapter("other", LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "other"])
    return model


def with_biases() -> Any:
    made = config()
    made.attention_bias = True
    torch.manual_seed(3)
    settings: Any = {"target_modules": ["q_proj"], "lora_bias": True, "init_lora_weights": False}
    return get_peft_model(LlamaForCausalLM(made), LoraConfig(**settings))


def of_experts() -> Any:
    """Both weights of a block's experts have one adapter inside of another."""
    torch.manual_seed(3)
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    settings: Any = {"target_parameters": targets, "init_lora_weights": False}
    return get_peft_model(Qwen3MoeForCausalLM(tiny_qwen3_moe()), LoraConfig(r=2, **settings))


@pytest.mark.parametrize(
    "make",
    [
        of_lora,
        of_experts,
        with_two_adapters,
        lambda: of_lora(use_dora=True),
        with_biases,
        lambda: of_lora(target_modules=["embed_tokens", "up_proj"]),
        lambda: of_lora(modules_to_save=["lm_head"]),
        lambda: of_lora().to(torch.bfloat16),
    ],
    ids=[
        "lora",
        "experts",
        "two adapters",
        "dora",
        "bias",
        "embeddings",
        "modules_to_save",
        "bf16",
    ],
)
def test_merged_weights_are_those_of_merge_adapter(make: Any) -> None:
    """To the bit, under the same names, and the bases are read only."""
    model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    versions = [parameter._version for parameter in model.parameters()]
    found = {name: weight.clone() for name, weight in merged_weights(model, CPU)}
    assert versions == [parameter._version for parameter in model.parameters()]
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    model.merge_adapter()
    expected = {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): parameter
        for name, parameter in model.named_parameters()
        if "lora_" not in name and "original_module" not in name
    }
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_merged_weights_of_quantized_ones() -> None:
    """Those of the dense model, also where nothing is merged into them."""
    quantized, dense = of_lora(), of_lora()
    for one, other in zip(quantized.modules(), dense.modules(), strict=True):
        if type(one) is nn.Linear and not one.weight.requires_grad:
            weight = QuantizedWeight.quantize(one.weight.detach(), INT8())
            one.weight = nn.Parameter(weight, requires_grad=False)
            other.weight = nn.Parameter(weight.dequantize(), requires_grad=False)
    expected = {name: weight.clone() for name, weight in merged_weights(dense, CPU)}
    found = {name: weight.clone() for name, weight in merged_weights(quantized, CPU)}
    assert list(found) == list(expected)
    for name, weight in expected.items():
        assert type(found[name]) is Tensor
        assert torch.equal(found[name], weight), name


def test_one_layer_is_merged_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy is gone when the next one is made."""
    inner, made = vllm.sharing, list[Any]()

    def sharing(layer: Any) -> Any:
        assert not any(one() is not None for one in made)
        copied = inner(layer)
        made.append(weakref.ref(copied))
        return copied

    monkeypatch.setattr(vllm, "sharing", sharing)
    for _ in merged_weights(of_lora(), CPU):
        pass
    assert len(made) == 2 * 3


def test_without_vllm_trl_says_so(folder: Path) -> None:
    with pytest.raises(ImportError, match="vLLM is not available"):
        make_one("grpo", True, folder, use_vllm=True, vllm_mode="server")


def test_vllm_on_the_engines_device_is_refused() -> None:
    gpus = [torch.device("cuda", index) for index in range(3)]
    with pytest.raises(ConfigError, match=r"'colocate' on cuda:0.*devices='cuda:1,cuda:2'"):
        refuse_among("RoundPipeGRPOTrainer", gpus[0], gpus)
    with pytest.raises(ConfigError, match=r"vllm_mode='server'.*devices='cuda:1'"):
        refuse_among("RoundPipeGRPOTrainer", gpus[0], gpus[:1])
    refuse_among("RoundPipeGRPOTrainer", gpus[0], gpus[1:])


class Engine:
    """vLLM's `LLM`, inside of this process."""

    made: list["Engine"]

    def __init__(self, **_: Any) -> None:
        self.sent = Sent()
        self.made.append(self)
        self.llm_engine = self.model_executor = self.driver_worker = self
        self.model_runner = self.model = self

    def load_weights(self, named: list[tuple[str, Tensor]]) -> None:
        for name, weight in named:
            if not self.sent or name in self.sent[-1]:
                self.sent.begin()
            self.sent.take(name, weight)

    def reset_prefix_cache(self) -> None:
        pass

    def generate(self, prompts: list[dict[str, list[int]]], **_: Any) -> list[Any]:
        return [_Output(row["prompt_token_ids"], place % 4) for place, row in enumerate(prompts)]


class _Output:
    def __init__(self, prompt: list[int], place: int) -> None:
        self.prompt_token_ids = prompt
        self.token_ids = completion(prompt, place)
        self.outputs = [self]
        self.logprobs = [{token: _LogProb()} for token in self.token_ids]


class _LogProb:
    rank, logprob = 1, -3.0


@both
def test_weights_for_an_engine_in_this_process(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device of its own."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")  # which TRL sets, and this puts back afterwards
        monkeypatch.delenv(name)
    monkeypatch.setattr(trls, "is_vllm_available", lambda: True)
    monkeypatch.setattr(trls, "LLM", Engine, raising=False)
    monkeypatch.setattr(trls, "SamplingParams", dict, raising=False)
    monkeypatch.setattr(Engine, "made", [], raising=False)
    settings: dict[str, Any] = {"use_vllm": True, "vllm_mode": "colocate", "peft_config": LORA}
    ours = run(make_one(kind, True, folder, **settings))
    plain = run(make_one(kind, False, folder, **settings))
    assert_same(Pair(ours, plain))
    assert_sent_alike(*(one.sent for one in Engine.made))
