"""The shared workload is what its options say."""

import pytest
import torch
from workload import Workload, make_model

from roundpipe.quantized import QuantizedWeight, quantizable

CPU = torch.device("cpu")


@pytest.mark.parametrize("quantization", ["nf4", "fp8", "int8", "mxfp4"])
def test_what_a_format_is_for_is_packed(quantization: str) -> None:
    """Stacked experts stayed dense in all formats but one, under the format's name."""

    def model(form: str | None) -> torch.nn.Module:
        workload = Workload(
            model="qwen3-30b-a3b", method="lora", rows=2, length=16, num_microbatch=1, tiny=True,
            layers=2, quantization=form,
        )  # fmt: skip
        return make_model(workload, CPU)

    wanted = set(quantizable(model(None), quantization))
    packed = {
        name
        for name, weight in model(quantization).named_parameters()
        if isinstance(weight, QuantizedWeight)
    }
    assert {name for name in wanted if "lora_" not in name} == packed
    assert any("experts" in name for name in packed)
