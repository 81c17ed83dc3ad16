"""Forms that scripts use as they do with torch, and errors that name what is wrong with others."""

import logging
import threading

import numpy as np
import pytest
import torch

import roundpipe
from roundpipe import RoundPipeRunConfig
from roundpipe.errors import ConfigError
from tests.support.device_sets import ONE
from tests.support.engines import Engines
from tests.support.models import make_llama, make_mlp, mlp_batch


def test_masters_are_read_as_torchs_parameters_are(engines: Engines) -> None:
    """With `next`, which failed on a list; and several times, as no iterator can be."""
    engine = engines(make_mlp(), ONE)
    masters = engine.optim_parameters()
    assert next(masters) is masters[0]
    assert next(masters) is masters[1]
    assert len(list(masters)) == len(masters)
    name, master = next(engine.optim_named_parameters())
    assert name == next(name for name, _ in engine.model.named_parameters())
    assert master is masters[0]


def test_numbers_of_numpy_are_numbers() -> None:
    assert RoundPipeRunConfig(num_microbatch=np.int64(3)).num_microbatch == 3
    for wrong in (np.int64(0), 2.0, "2"):
        with pytest.raises(ConfigError, match="num_microbatch is .*; it must be an integer"):
            RoundPipeRunConfig(num_microbatch=wrong)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is one")
def test_an_output_device_that_is_not_there() -> None:
    """It ended in a bare assertion, after the forward."""
    with pytest.raises(ConfigError, match="output_device is 'cuda:0', and this machine has 0 cuda"):
        RoundPipeRunConfig(output_device="cuda:0")
    assert RoundPipeRunConfig(output_device="cpu").output_device == "cpu"


def test_the_package_says_its_version() -> None:
    assert roundpipe.__version__.count(".") == 2


def test_a_number_given_to_a_grad_scaler_is_its_scale() -> None:
    """It was taken for the device, and the scale was 65536."""
    assert roundpipe.GradScaler(8192.0).get_scale() == 8192.0
    assert roundpipe.GradScaler("cuda", 4.0).get_scale() == 4.0


@pytest.mark.filterwarnings("error:Detected call of")
def test_a_scheduler_may_step_before_an_asynchronous_update(engines: Engines) -> None:
    """torch warned that `optimizer.step()` had not been called."""
    engine = engines(make_mlp(), ONE)
    batch = mlp_batch(8)
    optimizer = roundpipe.optim.SGD(engine.optim_parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    may_update = threading.Event()

    def step_fn() -> None:
        may_update.wait()
        optimizer.step()
        optimizer.zero_grad()

    engine.forward_backward(batch.args, label=batch.label, loss_fn=batch.loss_fn)
    engine.step(step_fn, is_async=True)
    scheduler.step()
    may_update.set()
    engine.synchronize()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_an_engine_says_its_name_and_its_layers(engines: Engines) -> None:
    """Where the model has such an attribute of its own, that is what is read."""
    engine = engines(make_mlp(), ONE, name="mine")
    assert (engine.name, engine.num_layers) == ("mine", len(make_mlp()))
    lstm = torch.nn.LSTM(4, 4, num_layers=2)
    assert engines(lstm, ONE).num_layers == 2
    with pytest.raises(AttributeError, match="num_layer'"):
        _ = engine.num_layer


def test_settings_of_a_run_may_be_given_by_position() -> None:
    config = RoundPipeRunConfig(False, "cpu", True, "layer", 3)
    assert config == RoundPipeRunConfig(
        requires_grad=False,
        output_device="cpu",
        preserve_rng_state=True,
        recompute_grain="layer",
        num_microbatch=3,
    )


@pytest.mark.parametrize("is_set_up", [True, False], ids=["logging set up", "not"])
def test_a_preset_that_nobody_asked_for_is_named_by_default(
    is_set_up: bool,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was logged at a level that is not shown where logging is not set up, and then as a
    warning, though nothing is wrong."""
    monkeypatch.setattr(logging.Logger, "hasHandlers", lambda _: is_set_up)
    wrap = roundpipe.wrap_model_to_roundpipe
    for use, is_shown in ((None, not is_set_up), (True, False)):
        caplog.clear()
        with caplog.at_level(logging.INFO, "roundpipe"):
            wrap(make_llama(tied=False), use_sequential_preset=use, devices=1).close()
        said = [one.levelname for one in caplog.records if "by its preset" in one.message]
        assert said == ["INFO"]
        assert ("runs by its preset as 6 layers" in capsys.readouterr().err) == is_shown


def test_the_devices_an_engine_would_get_can_be_counted() -> None:
    from roundpipe import device

    with roundpipe.RoundPipe(make_mlp()) as engine:
        assert device.get_num_devices() == len(device.device_list) == len(engine.devices)
        assert [one.name for one in device.device_list] == [one.name for one in engine.devices]
    with pytest.raises(AttributeError, match="no attribute 'devices'"):
        _ = device.devices


def test_a_weight_may_be_read_without_waiting_for_updates(engines: Engines) -> None:
    engine = engines(make_mlp(), ONE)
    optimizer = roundpipe.optim.SGD(engine.optim_parameters(), lr=0.1)
    batch = mlp_batch(8)
    may_update = threading.Event()

    def step_fn() -> None:
        may_update.wait()
        optimizer.step()
        optimizer.zero_grad()

    engine.forward_backward(batch.args, label=batch.label, loss_fn=batch.loss_fn)
    before = engine.get_parameter("0.weight").clone()
    engine.step(step_fn)
    assert torch.equal(engine.get_parameter("0.weight", up_to_date=False), before)
    may_update.set()
    assert not torch.equal(engine.get_parameter("0.weight"), before)


@pytest.mark.parametrize(
    ("statement", "instead"),
    [
        ("from roundpipe.timer import ModelTimer", r"roundpipe\.profile\("),
        ("import roundpipe.timer", "no ModelTimer"),
        ("from roundpipe.models.function import anything", "return_logits=False"),
        ("import roundpipe.models.function", "compile=True"),
    ],
)
def test_names_that_are_not_here_say_what_to_write(statement: str, instead: str) -> None:
    """Each time, not only the first."""
    for _ in range(2):
        with pytest.raises(ImportError, match=instead):
            exec(statement)
