"""What is printed by `python -m roundpipe`, as users type it, and the exit status that scripts
see."""

import errno
import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import roundpipe
from roundpipe.forecast import doctor, measure
from roundpipe.forecast.command import run
from roundpipe.forecast.doctor import Finding
from roundpipe.forecast.table import _joined as table_joined
from roundpipe.trace import table
from tests.support import ROOT

from .runs import measure_little, small_config


def typed(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """In a process of its own, whose output is no terminal."""
    path = os.pathsep.join(
        [environment.pop("PYTHONPATH", ""), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    )
    return subprocess.run(
        [sys.executable, "-m", "roundpipe", *arguments],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )


@pytest.fixture(autouse=True)
def _nothing_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "of nobody"))


@pytest.fixture
def folder(tmp_path: Path) -> str:
    small_config().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A step on two devices, exported."""
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    x, path = torch.randn(6, 8), tmp_path / "trace.json"
    with (
        roundpipe.RoundPipe(model, devices=roundpipe.virtual(2)) as engine,
        roundpipe.profile(path) as profiled,
    ):
        optimizer = roundpipe.optim.SGD(engine.optim_parameters(), lr=0.1)
        engine.forward_backward((x,), label=x, loss_fn=lambda out, _: out.sum())
        engine.step(optimizer.step, is_async=False)
        engine.synchronize()
    (tmp_path / "summary").write_text(profiled.summary())
    return path


def test_plan_prints_a_table_or_json(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["plan", folder, "--seq", "16", "--lora", "4", "--no-async"]
    assert run(arguments) == 0
    plain = capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert run(arguments) == 0
    in_terminal = capsys.readouterr().out
    for text in (in_terminal, plain):
        assert "Best: async_optimizer=False, pin_model='alloc'" in text
    assert "dense sync adamw alloc" in plain
    assert run([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found) == 4 * 2
    assert all(sum(each["device"].values()) == each["device_bytes"] for each in found)


def test_what_people_type_is_what_is_said(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Sizes without a unit had none; eighty stages took a line of 160 characters; a library warned
    of patterns that nobody had given."""
    typed = ["plan", folder, "--seq", "16", "--no-async", "--rows", "1", "--assumed"]
    assert run([*typed, "--gpu-memory", "24", "--ram", "64"]) == 0
    out, err = capsys.readouterr()
    assert "LoRA of rank 16, 8 x 16 tokens on 1 x 24 GB, 64 GB of RAM" in out
    assert err == ""
    assert table_joined([2, *[1] * 79]) == "2 + 79 x 1"
    assert table_joined([]) == "none"
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        run(["explain", "ConfigError"])
        assert run([*typed, "--quantization", "mxfp4"]) == 2
    assert not warned
    check = capsys.readouterr().err
    assert "no weights that mxfp4 is for" in check


def test_help_states_every_rate_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(["plan", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    for flag, default in (("--tflops", "100.0"), ("--link", "25.0"), ("--host", "50.0")):
        assert flag in said
        assert f"({default})" in said


def test_bench_is_kept_and_plans_use_it(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned(*options: str) -> str:
        assert run(["plan", folder, "--seq", "16", "--no-async", "--rows", "1", *options]) == 0
        return capsys.readouterr().out

    hint = "Rates are assumed where none is given: python -m roundpipe bench measures yours\n"
    measure_little(monkeypatch)
    before, returned, made = planned(), run(["bench"]), capsys.readouterr()
    assert (returned, made.err) == (0, "")
    assert "64GB of RAM" in before
    assert before.endswith(hint)
    found = json.loads(measure.measured_file().read_text())
    assert str(measure.measured_file()) in made.out
    after = planned()
    assert f"{found['machine']['ram']} of RAM" in after
    assert hint not in after
    assert "8GB of RAM" in planned("--ram", "8GB")
    assert planned("--assumed") + hint == before


def test_bench_without_a_place_to_keep_it_measures_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(measure, "matmul_tflops", lambda *_: pytest.fail("measured"))
    check_one_line(["bench"], "cannot be written to, so plans would not find", capsys)


def test_timeline_says_of_a_file_what_the_profile_said(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    returned, made = run(["timeline", str(trace)]), capsys.readouterr()
    assert (returned, made.err) == (0, "")
    title, *said = made.out.splitlines()
    assert title.startswith(f"{trace}: ")
    assert said == (trace.parent / "summary").read_text().splitlines()


def test_timeline_draws_what_it_is_told_to(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    drawn = tmp_path / "drawn.png"
    assert run(["timeline", str(trace), "--plot", str(drawn)]) == 0
    assert drawn.read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    check_one_line(["timeline", str(trace), "--plot", "a.xyz"], "a.xyz cannot be drawn", capsys)
    nowhere = str(tmp_path / "nowhere" / "a.png")
    check_one_line(["timeline", str(trace), "--plot", nowhere], "No such file or", capsys)


CONFIGS = {
    "none": None,
    "no JSON": '{"model_type": "llama"',
    "no object": "[1]",
    "without sizes": '{"model_type": "llama"}',
    "unknown": '{"model_type": "nobody knows"}',
    "absurd": '{"model_type": "llama", "hidden_size": null, "num_hidden_layers": 2}',
    "no layers": '{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 0}',
    "no words": '{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,'
    ' "vocab_size": 0}',
    "another kind": '{"model_type": "t5", "d_model": 8, "num_layers": 2}',
}
SAID = {
    "none": "has no config.json",
    "without sizes": "does not say hidden_size and num_hidden_layers, which would be guessed",
    "no layers": "says num_hidden_layers is 0; it must be at least 1",
    "no words": "says vocab_size is 0; it must be at least 1",
    "another kind": "no causal language model can be made of a T5Config",
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_config_that_is_none_is_one_line(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if (text := CONFIGS[kind]) is not None:
        (tmp_path / "config.json").write_text(text)
    check_one_line(["plan", str(tmp_path)], SAID.get(kind, "is no config that"), capsys)


def test_contradictory_options_are_one_line(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    both = ["plan", folder, "--full", "--quantization", "nf4"]
    check_one_line(both, "quantized weights do not train", capsys)
    check_one_line(["plan", folder, "--rows", "0"], "--rows is 0", capsys)
    check_one_line(["plan", folder, "--num-microbatch", "0"], "num_microbatch is 0", capsys)
    check_one_line(["plan", folder, "--gpu-memory", "2MB"], "nothing fits into", capsys)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan", "a", "--full", "--lora", "4"], "--lora: not allowed with argument --full"),
        (["plan", "a", "--lora", "16", "--full"], "--full: not allowed with argument --lora"),
        (["plan", "a", "--rows", "many"], "--rows: invalid int value: 'many'"),
        (["plan", "a", "--ram", "-3GB"], "--ram: expected one argument"),
        (["plan", "a", "--async", "--no-async"], "--no-async: not allowed with argument --async"),
        (["plan"], "required: model"),
        (["dance"], "invalid choice: 'dance'"),
        ([], "required: command"),
    ],
)
def test_flags_that_are_none_are_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The usage of `plan` took twelve lines, with what was wrong below it."""
    with pytest.raises(SystemExit) as ended:
        run(arguments)
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
    assert said in err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read: No such file"),
        ("", "is no trace that"),
        ("[]", "is no trace that"),
        ('{"traceEvents": [{"ph": "X"}]}', "is no trace that"),
        (
            '{"traceEvents": [{"ph": "M", "name": "thread_name", "tid": 1, "args": {"name": "x"}},'
            ' {"ph": "X", "name": "y", "tid": 1, "ts": 5, "dur": -3, "args": {}}]}',
            "is no trace that",
        ),
        ('{"traceEvents": []}', "shows no lane of a device"),
    ],
)
def test_a_trace_that_is_none_is_one_line(
    text: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.json"
    if text is not None:
        path.write_text(text)
    check_one_line(["timeline", str(path)], said, capsys)


def check_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"roundpipe {arguments[0]}: ")
    assert said in err


def test_an_error_of_our_own_is_one_line_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def show(*_: object) -> None:
        raise ArithmeticError("ours,\nin two lines")

    monkeypatch.setattr(doctor, "choose_devices", show)
    assert run(["doctor"]) == 1
    assert "ArithmeticError: ours, in two lines" in capsys.readouterr().out
    monkeypatch.setattr(table, "show", show)
    check_one_line(["doctor"], "ArithmeticError: ours, in two lines; please report it", capsys)


def test_a_full_disk_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A measurement that was cut off stayed, and the doctor said that the machine was measured."""

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    measure_little(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        check_one_line(["bench"], "No space left on device", capsys)
    left = [path.name for path in (tmp_path / "roundpipe").iterdir()]
    assert [name for name in left if not name.startswith("update-")] == []  # the compiled pass
    with monkeypatch.context() as patched:
        patched.setattr("roundpipe.kernels.native.tempfile.TemporaryFile", full)
        check_one_line(["bench"], "has no room, so plans would not find", capsys)
        (cache,) = doctor._cache()
    assert cache.slow
    assert cache.found == f"{tmp_path}/roundpipe has no room"
    (cache,) = doctor._cache()
    assert cache.found.endswith("not measured")
    measure.measured_file().write_text("{")
    (cache,) = doctor._cache()
    assert cache.found.endswith("not measured")


@pytest.mark.parametrize("arguments", [["explain", "slow"], ["--help"], ["plan", "--help"]])
def test_output_that_cannot_be_written_is_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", open(full, "w", closefd=False))  # noqa: SIM115
        assert run(arguments) == 2
        with pytest.raises(OSError, match="No space"):
            sys.stdout.close()
    os.close(full)
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "No space left on device" in err


def test_nobody_needs_to_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    """`>&-` was an AttributeError."""
    monkeypatch.setattr(sys, "stdout", None)
    assert run(["explain", "slow"]) == 0


def test_warnings_about_libraries_are_for_nobody_who_types_a_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def warn() -> list[Finding]:
        warnings.warn("`old` is deprecated", FutureWarning, stacklevel=1)
        return []

    monkeypatch.setattr("roundpipe.forecast.command.examine", warn)
    assert run(["doctor"]) == 0
    assert capsys.readouterr().err == ""


def test_an_interrupt_while_libraries_load_prints_nothing(tmp_path: Path) -> None:
    """The imports of the first seconds showed their traceback."""
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    made = typed("explain", PYTHONPATH=str(tmp_path))
    assert (made.returncode, made.stdout, made.stderr) == (-signal.SIGINT, "", "")


def test_the_doctor_names_what_is_slow_and_why(tmp_path: Path) -> None:
    """No compiler on the path, and a cache that is below a file."""
    (tmp_path / "file").write_text("")
    cache = str(tmp_path / "file" / "cache")
    made = typed("doctor", PATH="", XDG_CACHE_HOME=cache)
    assert made.returncode == 1, made.stderr
    assert "no cc, gcc or clang" in made.stdout
    assert f"{cache}/roundpipe cannot be written to" in made.stdout
    assert "Traceback" not in made.stderr
    assert made.stdout.splitlines()[-1].startswith("To look at: ")


def test_the_doctors_exit_status_is_what_he_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fine, slow = Finding("link", "25 GB/s"), Finding("swap", "3 GB in use", "short of memory")
    for findings, status in (([fine], 0), ([fine, slow], 1)):
        monkeypatch.setattr("roundpipe.forecast.command.examine", lambda: findings)  # noqa: B023
        assert run(["doctor"]) == status
    assert "To look at: swap" in capsys.readouterr().out


def test_more_threads_than_cores_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "usable_cores", lambda: 3)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    found = {each.what: each for each in doctor.examine()}
    assert "set OMP_NUM_THREADS=3" in found["cores"].slow


def test_the_doctor_sees_what_there_is() -> None:
    found = {each.what: each for each in doctor.examine()}
    has_gpu = torch.accelerator.is_available()
    assert ("link" in found) == has_gpu
    assert ("copies" in found) == (not has_gpu)
    assert f"{os.cpu_count()}" in found["cores"].found
    assert float(found["host memory"].found.split()[0]) > 0


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["at the end", "line by line"])
def test_a_reader_that_has_read_enough_is_no_error(unbuffered: str, trace: Path) -> None:
    """As `| head -1` is."""
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run(
        [sys.executable, "-m", "roundpipe", "timeline", trace],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        timeout=110,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": unbuffered},
    )
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (141, "")
