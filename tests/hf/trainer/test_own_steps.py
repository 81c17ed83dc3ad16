"""Training steps of the user's own that look at gradients: what they do with the plain Trainer, or
an error, because the pipeline keeps gradients and what is done to copies would be lost."""

from typing import Any

import pytest
import torch
from torch import Tensor

from roundpipe.errors import ConfigError
from roundpipe_hf import RoundPipeTrainer
from roundpipe_hf.engine.watchers import has_own
from roundpipe_hf.trl import RoundPipeGRPOTrainer
from tests.support.trainers import MODELS, assert_same, make_trainer, run, token_rows, train_both

ROWS = token_rows(12)
REFUSED_READ = r"reads the gradient of 'model.embed_tokens.weight'.*self.synchronize\(\)"
REFUSED_CHANGE = "changed the gradient of '.*'.*max_grad_norm.*optimizer_cls_and_kwargs"


class Backward:
    """Goes forward and backward, and then looks."""

    looks_after_synchronize = True

    def training_step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        model.train()
        loss: Tensor = self._backward(model, inputs, num_items_in_batch)
        self.look(model, inputs, num_items_in_batch)
        return loss

    def _backward(self: Any, model: Any, inputs: Any, num_items: Any) -> Tensor:
        loss: Tensor = self.compute_loss(model, dict(inputs), num_items_in_batch=num_items)
        self.accelerator.backward(loss)
        if self.looks_after_synchronize and isinstance(self, RoundPipeTrainer):
            self.synchronize()
        return loss.detach()

    def look(self: Any, model: Any, inputs: Any, num_items: Any) -> None:
        raise NotImplementedError


class AttacksEmbeddings(Backward):
    """Trains on the batch a second time, with embeddings moved along their gradient."""

    def look(self: Any, model: Any, inputs: Any, num_items: Any) -> None:
        embeddings = self.model.get_input_embeddings().weight
        kept = embeddings.data.clone()
        embeddings.data.add_(0.5 * embeddings.grad / embeddings.grad.norm())
        self._backward(model, inputs, num_items)
        embeddings.data.copy_(kept)


class MinimizesSharpness(Backward):
    """Trains with the gradients of weights moved along the first ones, which are dropped."""

    @torch.no_grad()
    def look(self: Any, model: Any, inputs: Any, num_items: Any) -> None:
        weights = [weight for weight in self.model.parameters() if weight.grad is not None]
        kept = [weight.clone() for weight in weights]
        norm = torch.stack([weight.grad.norm() for weight in weights]).norm()
        for weight in weights:
            weight.add_(0.05 * weight.grad / norm)
        model.zero_grad()
        with torch.enable_grad():
            self._backward(model, inputs, num_items)
        for weight, before in zip(weights, kept, strict=True):
            weight.copy_(before)


@pytest.mark.parametrize("step", [AttacksEmbeddings, MinimizesSharpness])
def test_steps_that_read_gradients(step: type) -> None:
    assert_same(train_both(MODELS["full"], ROWS, step))


class Clips(Backward):
    def look(self: Any, model: Any, inputs: Any, num_items: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.01)


class Scales(Backward):
    def look(self: Any, model: Any, inputs: Any, num_items: Any) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.1)


class ScalesThePrevious(Scales):
    """The copies that it changes are no longer those in ``.grad`` when the step returns."""

    def look(self: Any, model: Any, inputs: Any, num_items: Any) -> None:
        super().look(model, inputs, num_items)
        self.synchronize()


@pytest.mark.parametrize("step", [Clips, Scales])
def test_gradients_that_are_not_there_are_no_gradients_to_skip(step: type) -> None:
    """Code that leaves out parameters without a gradient left out all, and said nothing."""
    early = type("Early", (step, RoundPipeTrainer), {"looks_after_synchronize": False})
    with pytest.raises(ConfigError, match=REFUSED_READ):
        run(make_trainer(early, MODELS["full"](), ROWS))


@pytest.mark.parametrize("step", [Clips, Scales, ScalesThePrevious])
def test_changing_copies_is_refused(step: type) -> None:
    mixed = type("Mixed", (step, RoundPipeTrainer), {})
    with pytest.raises(ConfigError, match=REFUSED_CHANGE):
        run(make_trainer(mixed, MODELS["full"](), ROWS))


class _EachGradient(Backward):
    looks_after_synchronize = False

    def look(self: Any, model: Any, inputs: Any, num_items: Any) -> None:
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                self.handle(parameter)

    def handle(self, parameter: Any) -> None:
        raise NotImplementedError


class Replaces(_EachGradient):
    def handle(self, parameter: Any) -> None:
        parameter.grad = torch.ones_like(parameter)


class Drops(_EachGradient):
    def handle(self, parameter: Any) -> None:
        if parameter.ndim == 1:
            parameter.grad = None


class Deletes(_EachGradient):
    def handle(self, parameter: Any) -> None:
        del parameter.grad


class ReplacesCopies(_EachGradient):
    looks_after_synchronize = True

    def handle(self, parameter: Any) -> None:
        parameter.grad = parameter.grad * 0.1


class DropsCopies(Drops):
    looks_after_synchronize = True


class ScalesThroughData(_EachGradient):
    looks_after_synchronize = True

    def handle(self, parameter: Any) -> None:
        parameter.grad.data.mul_(0.1)


class ScalesThroughNumPy(_EachGradient):
    looks_after_synchronize = True

    def handle(self, parameter: Any) -> None:
        parameter.grad.numpy()[...] *= 0.1


class Penalizes(Backward):
    """Goes backward through weights of the model that the pipeline has copies of."""

    looks_after_synchronize = False

    def look(self: Any, model: Any, inputs: Any, num_items: Any) -> None:
        torch.stack([p.square().sum() for p in self.model.parameters()]).sum().backward()


class PenalizesCopies(Penalizes):
    """Adds in place to the copies, which stay the same objects."""

    looks_after_synchronize = True


REFUSED_ANYHOW = {
    Replaces: "sets the gradient of '.*'.*max_grad_norm.*optimizer_cls_and_kwargs",
    ReplacesCopies: "sets the gradient of '.*'.*max_grad_norm.*optimizer_cls_and_kwargs",
    Drops: r"drops the gradient of '.*norm.*'.*zero_grad\(\)",
    Deletes: r"drops the gradient of '.*'.*zero_grad\(\)",
    DropsCopies: r"drops the gradient of '.*norm.*'.*zero_grad\(\)",
    ScalesThroughData: REFUSED_CHANGE,
    ScalesThroughNumPy: REFUSED_CHANGE,
    Penalizes: "left a gradient in the model's own '.*'.*call the model it is given",
    PenalizesCopies: REFUSED_CHANGE,
}


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("step", REFUSED_ANYHOW)
def test_gradients_that_the_update_would_not_see(step: type, devices: int) -> None:
    """Whatever is in ``.grad`` when a step returns, plain Trainer updates with: that was ignored,
    and the weights became others than plain's, without a word."""
    mixed = type("Mixed", (step, RoundPipeTrainer), {})
    with pytest.raises(ConfigError, match=REFUSED_ANYHOW[step]):
        run(make_trainer(mixed, MODELS["full"](), ROWS, devices=devices))


class DropsWhatIsGone(Backward):
    """Clears each gradient itself before the backward, and what it made of one after it."""

    def training_step(self: Any, model: Any, *args: Any, **kwargs: Any) -> Tensor:
        for parameter in self.model.parameters():
            parameter.grad = None
        return super().training_step(model, *args, **kwargs)

    def look(self: Any, model: Any, inputs: Any, num_items: Any) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.1)
        model.zero_grad()
        self._backward(model, inputs, num_items)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_what_is_done_to_gradients_that_count_for_nothing(kind: str) -> None:
    """It is no reason to refuse a step."""
    assert_same(train_both(MODELS[kind], ROWS, DropsWhatIsGone))


class ZeroesFirst:
    """Reads gradients when there are none yet, and again when there are."""

    scales = False

    def training_step(self: Any, model: Any, *args: Any, **kwargs: Any) -> Tensor:
        self.model.zero_grad()
        loss: Tensor = super().training_step(model, *args, **kwargs)  # type: ignore[misc]
        if self.scales:
            Scales.look(self, model, None, None)
        return loss


def test_reading_where_there_are_none_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the pipeline once a step, not once a parameter."""
    waits: list[None] = []
    synchronize = RoundPipeTrainer.synchronize

    def counted(self: Any) -> None:
        waits.append(None)
        synchronize(self)

    monkeypatch.setattr(RoundPipeTrainer, "synchronize", counted)
    pair = train_both(MODELS["full"], ROWS, ZeroesFirst)
    assert_same(pair)
    assert len(waits) <= 2 * pair.ours.state.global_step + 2  # logging and the end wait, too
    late = type("Late", (ZeroesFirst, RoundPipeTrainer), {"scales": True})
    with pytest.raises(ConfigError, match=REFUSED_READ):
        run(make_trainer(late, MODELS["full"](), ROWS))


def test_steps_of_trl_are_not_watched() -> None:
    """They generate, which is thousands of operations."""
    assert not has_own(object.__new__(RoundPipeGRPOTrainer), "training_step")
    assert not has_own(object.__new__(RoundPipeTrainer), "training_step")
    assert has_own(object.__new__(type("Mixed", (Clips, RoundPipeTrainer), {})), "training_step")
