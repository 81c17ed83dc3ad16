"""A name that scripts import and that is not here: importing it says what to write instead."""

raise ImportError(
    "roundpipe.timer: there is no ModelTimer; layers are timed without one. Leave it out. "
    "`with roundpipe.profile('trace.json'):` writes what each device did when, and "
    "engine.statistics() has counts and bytes"
)
