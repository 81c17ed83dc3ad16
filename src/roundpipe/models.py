"""A name that scripts import and that is not here: importing it says what to write instead."""

raise ImportError(
    "roundpipe.models.function: there are no causal losses to put into a model. Leave them out: "
    "a model with a preset computes its own loss in chunks, without all the logits, in "
    "forward_backward() and with return_logits=False; RoundPipe(..., compile=True) compiles it"
)
