"""What a trainer says of its steps beside its log, which stays that of the plain Trainer."""

import logging
import re
from typing import Any

import pytest
import torch
from transformers import Trainer

from roundpipe.trace import spans
from roundpipe_hf import RoundPipeTrainer
from roundpipe_hf.trainer import figures
from tests.support.trainers import (
    MODELS,
    assert_same,
    differ,
    make_trainer,
    run,
    token_rows,
    train_both,
    trained,
    weights,
)

ROWS = token_rows(12)
TOKENS = 6 * 12  # of a step: two batches of three rows
LOGGER = figures.__name__
SETTINGS: dict[str, Any] = {"gradient_accumulation_steps": 2, "num_train_epochs": 2}
RATES = re.compile(
    r"step (\d+): (\d+) tokens/s, (\d+) ms/step, bound by (\w+) \((.*)\); .*host peak \d"
)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == LOGGER]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("devices", [1, 3])
def test_each_entry_has_its_line_and_no_lane_is_waited_for(
    devices: int,
    is_async: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spans, "_origin_of", lambda _: pytest.fail("waits for a lane"))
    caplog.set_level(logging.INFO, LOGGER)
    settings = SETTINGS | {"devices": devices, "async_optimizer": is_async, "logging_steps": 2}
    trained(RoundPipeTrainer, MODELS["full"](), ROWS, **settings)
    compared, *entries = lines(caplog)
    assert re.match(r"step 2: measured \d+ ms, .*roundpipe.estimate: \d+ ms", compared)
    found = [RATES.match(entry) for entry in entries]
    assert [match and match[1] for match in found] == ["2", "4"]
    for match in filter(None, found):
        rate, ms, bound, shares = int(match[2]), int(match[3]), match[4], match[5]
        # Both are rounded to whole numbers.
        assert rate * ms / 1e3 == pytest.approx(TOKENS, abs=0.5 * (rate + ms + 1) / 1e3)
        assert shares.startswith(f"{bound} "), "the largest share comes first"
        assert {"data", "compute", "optimizer"} <= set(re.findall(r"[a-z]+", shares))


@pytest.mark.parametrize("kind", ["full", "lora", pytest.param("tied", marks=pytest.mark.slow)])
def test_the_log_and_the_numbers_stay_those_of_plain_trainer(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also the random ones: the estimate makes a model of its own on the way."""
    silent = trained(RoundPipeTrainer, MODELS[kind](), ROWS, devices=1, **SETTINGS)
    after = torch.get_rng_state()
    caplog.set_level(logging.INFO, LOGGER)
    pair = train_both(MODELS[kind], ROWS, devices=1, **SETTINGS)
    assert "roundpipe.estimate: " in lines(caplog)[1]
    assert_same(pair)
    logging_too = trained(RoundPipeTrainer, MODELS[kind](), ROWS, devices=1, **SETTINGS)
    assert torch.equal(torch.get_rng_state(), after)
    assert not differ(weights(silent), weights(logging_too))


def test_nobody_listens_where_nobody_would_read(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, LOGGER)

    class Listening(RoundPipeTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            assert not spans._listeners
            return super().training_step(*args, **kwargs)

    trained(Listening, MODELS["full"](), ROWS, **SETTINGS)
    assert not lines(caplog)


def test_a_model_that_cannot_be_planned_for_is_only_measured(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    trainer = make_trainer(RoundPipeTrainer, MODELS["full"](), ROWS, **SETTINGS)
    trainer.model.config.model_type = trainer.model.config.architectures = None
    type_of = type("Unknown", (type(trainer.model.config),), {})
    trainer.model.config.__class__ = type_of
    run(trainer)
    [said] = [line for line in lines(caplog) if "measured" in line]
    assert re.search(r"; no estimate \(ConfigError: .*no causal language model", said)


def test_what_pauses_a_run_is_no_step(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock stands while the Trainer evaluates, here for an hour after each step."""
    now = [0.0]
    monkeypatch.setattr(figures.time, "perf_counter", lambda: now[0])
    caplog.set_level(logging.INFO, LOGGER)

    class Slow(RoundPipeTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            now[0] += 0.25
            return super().training_step(*args, **kwargs)

        def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            now[0] += 3600
            return super().evaluate(*args, **kwargs)

    trained(Slow, MODELS["full"](), ROWS, eval_dataset=ROWS[:3], eval_strategy="steps", **SETTINGS)
    found = [match for line in lines(caplog) if (match := RATES.match(line))]
    # A step begins with its first batch, or where the one before has ended.
    assert {match[3] for match in found[1:]} == {"500"}


def test_the_plain_trainer_is_not_touched(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    trained(Trainer, MODELS["full"](), ROWS, **SETTINGS)
    assert not lines(caplog)
