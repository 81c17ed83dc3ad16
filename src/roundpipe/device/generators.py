"""Reading a random generator without a deadlock."""

import gc
import threading

import torch

# Because whoever pauses the collector has to know whether another thread has.
_lock = threading.Lock()


def state_of(generator: torch.Generator) -> torch.Tensor:
    """``generator.get_state()``, in which no collection comes.

    torch makes the tensor while it holds the generator's mutex. A collection that comes just then
    may run finalizers, during which another thread gets the interpreter; if that one asks for the
    state too, it waits for the mutex without giving the interpreter back, and nobody goes on.
    """
    with _lock:
        was_enabled = gc.isenabled()
        try:
            gc.disable()
            return generator.get_state()
        finally:
            if was_enabled:
                gc.enable()
