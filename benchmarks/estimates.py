"""Compares what `roundpipe.estimate` says of a run with what the run then takes: device
memory, host memory, time of a step.

    python benchmarks/estimates.py --tflops 400 --link 50 --host 120   # on a GPU, minutes
    python benchmarks/estimates.py --tiny                              # on a virtual device

Each setting trains random weights in a process of its own. Rates decide the times that are
predicted: give those that ceilings.py finds. The device's figure is that of tensors. The host's is
the most anonymous and shared memory at any moment of wrapping and training, less what the process
had before the model was made; on a virtual device, whose memory is the host's too, it says nothing
and is left out. Fails if a peak is more than a tenth from what was predicted, or a twentieth above
it.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from typing import Any

import host_memory
import measure
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from workload import MODELS, TINY

import roundpipe
from roundpipe.forecast.machine import CONTEXT_BYTES
from roundpipe.quantized import FORMATS, QuantizedWeight, quantizable
from roundpipe.system.host_memory import free_host_bytes, return_freed

# Model, method (a rank or "full"), quantization, optimizer, async, GB of a device, rows, tokens.
SETTINGS: tuple[tuple[str, str, str, str, bool, float, int, int], ...] = (
    ("llama-3.2-1b", "full", "none", "adamw", False, 12, 8, 2048),
    ("llama-3.2-1b", "full", "none", "adamw", True, 12, 8, 2048),
    ("llama-3.2-1b", "full", "none", "adamw", False, 60, 8, 2048),
    ("llama-3.2-1b", "full", "none", "adamw_bf16", True, 16, 8, 1024),
    ("llama-3.2-1b", "full", "none", "adamw_8bit", False, 16, 4, 4096),
    ("llama-3.2-1b", "16", "none", "adamw", False, 16, 8, 2048),
    ("qwen3-1.7b", "full", "none", "adamw", True, 24, 8, 2048),
    ("qwen3-1.7b", "32", "nf4", "adamw", False, 12, 8, 2048),
    ("qwen3-1.7b", "32", "int8", "adamw", True, 16, 8, 1024),
    ("llama-3-8b", "32", "none", "adamw", False, 24, 8, 2048),
    ("llama-3-8b", "32", "nf4", "adamw", True, 24, 4, 4096),
    ("llama-3-8b", "32", "fp8", "adamw", False, 40, 8, 2048),
)
LEAST, MOST = 0.95, 1.10
COLUMNS = [
    "setting", "device_gb", "device_predicted_gb", "device_ratio", "host_gb", "host_predicted_gb",
    "host_ratio", "step_ms", "step_predicted_ms",
]  # fmt: skip
STEPS, WARM_UP = 12, 6


def config_of(name: str, *, tiny: bool) -> Any:
    shapes = MODELS[name]
    made = getattr(transformers, shapes.config_class)(**(shapes.config | (TINY if tiny else {})))
    made.dtype = torch.float32 if tiny else torch.bfloat16
    return made


def model_of(config: Any, lora: int | None, quantization: str, device: torch.device) -> nn.Module:
    """On the host, of random weights that ``device`` has made, because a GPU does in seconds what
    takes a CPU minutes."""
    torch.manual_seed(0)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    model = model.cpu()
    form = FORMATS.get(quantization)
    for name in quantizable(model, quantization) if form is not None else ():
        path, _, own = name.rpartition(".")
        owner = model.get_submodule(path)
        dense = getattr(owner, own).detach()
        parts = [part.cpu() for part in form.quantize(dense.to(device))]
        weight = QuantizedWeight(form, parts, dense.shape, dense.dtype)
        setattr(owner, own, nn.Parameter(weight, requires_grad=False))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return (
        model
        if lora is None
        else get_peft_model(model, LoraConfig(r=lora, target_modules="all-linear"))
    )


def optimizer_of(name: str, masters: Any) -> torch.optim.Optimizer:
    lean: dict[str, Any] = {"adamw_bf16": torch.bfloat16, "adamw_8bit": "8bit"}
    if name in lean:
        return roundpipe.optim.LeanAdamW(masters, moments=lean[name])
    return roundpipe.optim.AdamW(masters)


def train(
    model: nn.Module, optimizer: str, rows: int, tokens: int, *, is_async: bool, limit: float
) -> tuple[list[float], Any]:
    """Milliseconds of each step, and of virtual devices the most bytes; 0 for others."""
    vocabulary: Any = model.config
    ids = torch.randint(0, vocabulary.vocab_size, (rows, tokens))
    inputs = {"input_ids": ids, "labels": ids, "skip_logits": True}
    engine: Any = roundpipe.wrap_model_to_roundpipe(
        model, devices=1, max_gpu_memory=limit, optim_dtype=torch.float32
    )
    times = []
    with engine:
        made = optimizer_of(optimizer, engine.optim_parameters())
        for _ in range(STEPS):
            begin = time.perf_counter()
            engine.forward_backward((), inputs, loss_fn=lambda output, _: output.loss)
            engine.step(made.step, is_async)
            times.append(1e3 * (time.perf_counter() - begin))
        engine.synchronize()
        measure.wait_device()
        return times, engine.devices[0].memory_in_use().most


def run_setting(index: int, options: argparse.Namespace) -> int:
    """In a process that has done nothing else."""
    name, method, quantization, optimizer, is_async, gigabytes, rows, tokens = SETTINGS[index]
    lora = None if method == "full" else int(method)
    has_gpu = torch.cuda.is_available() and not options.tiny
    if options.tiny:
        tokens, gigabytes, lora = 64, 0.2, lora and 4
    (predicted,) = roundpipe.estimate(
        config_of(name, tiny=options.tiny),
        lora=lora, seq=tokens, batch=rows, num_microbatch=2, quantization=quantization,
        optimizer=optimizer, async_optimizer=is_async, pin_model="alloc",
        devices="cuda" if has_gpu else "cpu",
        gpu_memory=gigabytes + (CONTEXT_BYTES / 1e9 if has_gpu else 0),
        ram=free_host_bytes() / 1e9,
        tflops=options.tflops, link=options.link, host=options.host, cores=options.cores,
    )  # fmt: skip
    maker = torch.device("cuda" if has_gpu else "cpu")
    # What every process has once: libraries, and the kernels for these shapes.
    config = config_of(name, tiny=options.tiny)
    config.num_hidden_layers, config.vocab_size = 1, 4096
    small = model_of(config, lora, quantization, maker)
    train(small, optimizer, rows, tokens, is_async=is_async, limit=gigabytes)
    del small
    gc.collect()
    before, peak = host_memory.resident_bytes(), host_memory.Peak()
    model = model_of(config_of(name, tiny=options.tiny), lora, quantization, maker)
    # Not before, because a dense model was there until it was quantized.
    return_freed()
    peak.start()
    measure.reset_peaks()
    times, device = train(model, optimizer, rows, tokens, is_async=is_async, limit=gigabytes)
    host = peak.stop() - before
    how = "async" if is_async else "sync"
    record = {
        "setting": f"{name} {method} {quantization} {optimizer} {how} {gigabytes:g} GB "
        f"{rows} x {tokens}",
        "device_gb": device / 1e9,
        "device_predicted_gb": predicted.device_bytes / 1e9,
        "device_ratio": predicted.device_bytes / device,
        "host_gb": host / 1e9 if has_gpu else None,
        "host_predicted_gb": predicted.host_bytes / 1e9,
        "host_ratio": predicted.host_bytes / host if has_gpu else None,
        "step_ms": statistics.median(times[WARM_UP:]),
        "step_predicted_ms": predicted.step_ms,
        "device_parts": json.dumps(predicted.device),
        "host_parts": json.dumps(predicted.host),
    }
    measure.run_row(record, COLUMNS)
    ratios = [record["device_ratio"], record["host_ratio"]]
    return int(not all(ratio is None or LEAST <= ratio <= MOST for ratio in ratios))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for rate, default in (("tflops", 100.0), ("link", 25.0), ("host", 50.0), ("cores", 16)):
        parser.add_argument(f"--{rate}", type=type(default), default=default)
    parser.add_argument("--tiny", action="store_true", help="on a virtual device")
    parser.add_argument(
        "--only", type=int, nargs="+", default=range(len(SETTINGS)), help="numbers of settings"
    )
    parser.add_argument("--setting", type=int, help="this one, in this process")
    options = parser.parse_args()
    if options.setting is not None:
        return run_setting(options.setting, options)
    rates = [f"--{rate}={getattr(options, rate)}" for rate in ("tflops", "link", "host", "cores")]
    common = rates + ["--tiny"] * options.tiny
    return measure.run_rows([["--setting", str(index), *common] for index in options.only], COLUMNS)


if __name__ == "__main__":
    sys.exit(main())
