"""A number means the same number of bytes wherever memory is said.

``max_gpu_memory=8.0`` was 8 GB and ``model_memory_limit=8.0`` 8 bytes.
"""

from typing import Any

import pytest

from roundpipe import ModelExecutePlan, PlanError
from roundpipe.errors import ConfigError
from roundpipe.system.sizes import bytes_of
from roundpipe_hf import RoundPipeTrainingArguments
from tests.support.device_sets import ONE, THREE, DeviceSet
from tests.support.engines import Engines
from tests.support.models import make_mlp

SAME = [8.0, 8, "8", "8GB", "8 gb", "8000MB", "8e9B"]


@pytest.mark.parametrize("size", SAME[:-1], ids=repr)
def test_forms_of_one_size(size: Any) -> None:
    assert bytes_of(size, "limit") == 8 * 10**9


@pytest.mark.parametrize("size", [0, -1.0, True, None, "8XB", "GB", SAME[-1]], ids=repr)
def test_what_is_no_size_is_refused_by_the_settings_name(size: Any) -> None:
    with pytest.raises(ConfigError, match=r"^limit is .*such as '24GB' or '900MiB'"):
        bytes_of(size, "limit")


@pytest.mark.parametrize("devices", [ONE, THREE], ids=str)
def test_every_limit_is_in_the_same_unit(devices: DeviceSet, engines: Engines) -> None:
    """A limit of so many GB holds the model as one stage where as many bytes hold nothing."""
    few = 2**-10
    engine = engines(make_mlp(), devices, max_gpu_memory=few)
    assert {device.limit_bytes() for device in engine.devices} == {bytes_of(few, "limit")}
    plan = ModelExecutePlan.auto("fused", engine, model_memory_limit=few)
    assert plan == ModelExecutePlan.auto("fused", engine, model_memory_limit=f"{few}GB")
    with pytest.raises(PlanError):
        ModelExecutePlan.auto("fused", engine, model_memory_limit="8B")
    assert RoundPipeTrainingArguments("out", max_gpu_memory="8").max_gpu_memory == 8.0
