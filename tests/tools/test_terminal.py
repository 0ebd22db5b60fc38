"""The commands as a terminal shows them: colours and bars where a person reads, JSON for programs, completion."""

import importlib.metadata
import importlib.util
import io
import json
import math
import re
import subprocess
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shardopt
from shardopt.__main__ import main
from shardopt.tools import progress as bars
from shardopt.tools import terminal, top
from shardopt.tools.progress import progress
from shardopt.tools.terminal import CommandResult, show
from tests.support.paths import ROOT
from tests.support.scripts import run_module, run_script

Printed = pytest.CaptureFixture[str]
CODES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Terminal(io.StringIO):
    """What a person looks at."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def person(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A terminal with colours, with Rich."""
    pytest.importorskip("rich")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    return monkeypatch


def shown(result: CommandResult, to: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("sys.stdout", to)
    show(result, as_json=False)
    return to.getvalue()


def test_colours_are_for_people(person: pytest.MonkeyPatch) -> None:
    """The words are the same; NO_COLOR, a file, and a machine without Rich have no codes."""
    text = "whole    runs/step-3: 5 B\nDAMAGED  [bold]file 1[/bold]\nplain :smile: 12"
    coloured = shown(CommandResult({}, text), Terminal(), person)
    assert CODES.sub("", coloured) == text + "\n"
    good, bad, plain = coloured.splitlines()
    assert CODES.search(good) and CODES.search(bad) and good[:4] != bad[:4] and not CODES.search(plain)
    assert shown(CommandResult({}, text), io.StringIO(), person) == text + "\n"
    person.setenv("NO_COLOR", "1")
    assert shown(CommandResult({}, text), Terminal(), person) == text + "\n"
    person.delenv("NO_COLOR")
    person.setattr(terminal, "has_rich", lambda: False)
    assert shown(CommandResult({}, text), Terminal(), person) == text + "\n"


@pytest.mark.parametrize("has_rich", [True, False])
def test_a_bar_is_for_people_who_wait(has_rich: bool, person: pytest.MonkeyPatch) -> None:
    person.setattr(terminal, "has_rich", lambda: has_rich)
    now = [0.0]
    person.setattr(bars, "time", SimpleNamespace(monotonic=lambda: now[0]))  # other threads keep the process's clock
    for to, seconds, is_shown in ((Terminal(), 1.0, True), (Terminal(), 0.01, False), (io.StringIO(), 1.0, False)):
        person.setattr("sys.stderr", to)
        with progress("reading", 4 << 20) as advance:
            for _ in range(4):
                now[0] += seconds
                advance(1 << 20)
        assert ("reading" in to.getvalue()) == is_shown, (to.getvalue(), seconds)
        assert not is_shown or ("4.0/4.0 MiB" if has_rich else "100% of 4.0 MiB") in to.getvalue(), to.getvalue()


def test_a_bar_waits_for_a_first_part(person: pytest.MonkeyPatch) -> None:
    """An empty tensor comes first, after half a second."""
    person.setattr(terminal, "has_rich", lambda: False)
    now = iter([0.0, 1.0, 1.0, 2.0, 2.0])
    person.setattr(bars, "time", SimpleNamespace(monotonic=lambda: next(now)))
    person.setattr("sys.stderr", to := Terminal())
    with progress("reading", 4 << 20) as advance:
        advance(0)
        advance(1 << 20)
    assert "25% of 4.0 MiB" in to.getvalue()


def test_a_live_view_shows_each_step_until_it_is_interrupted(person: pytest.MonkeyPatch, tmp_path: Path) -> None:
    optimizer = shardopt.ShardedSGD([torch.nn.Parameter(torch.zeros(3))], lr=1.0)
    optimizer.monitor(tmp_path, every=0)

    def trained(seconds: float) -> None:
        """In place of a pause."""
        if optimizer.updates == 3:
            raise KeyboardInterrupt
        optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
        optimizer.step()

    trained(1.0)
    screen = Terminal()
    person.setattr("sys.stdout", screen)
    person.setattr(top, "time", SimpleNamespace(sleep=trained, time=time.time))
    assert main(["top", str(tmp_path)]) == 0
    seen = re.findall(r"updates +(\d)", CODES.sub("", screen.getvalue()))
    assert list(dict.fromkeys(seen)) == ["1", "2", "3"]


def test_json_is_json(capsys: Printed) -> None:
    """A norm that is NaN is null, as most parsers know no NaN."""
    assert show(CommandResult({"norms": [math.nan, math.inf, (1.5, -math.inf)]}, ""), as_json=True) == 0
    out = capsys.readouterr().out
    assert json.loads(out, parse_constant=pytest.fail) == {"norms": [None, None, [1.5, None]]}


def as_json(arguments: list[str], capsys: Printed) -> Any:
    code = main([*arguments, "--json"])
    out, err = capsys.readouterr()
    assert code == 0 and not err, (arguments, err)
    return json.loads(out)


def test_every_answer_is_json_as_well(tmp_path: Path, capsys: Printed) -> None:
    """With the numbers of what was saved, planned, compared."""
    model = torch.nn.Linear(300, 7)
    opt = shardopt.ShardedAdamW(model, lr=0.5, stage=2)
    model(torch.ones(1, 300)).sum().backward()
    opt.step()
    path = shardopt.save_checkpoint(tmp_path / "runs", model, opt, extra={"epoch": 1}).path
    runs, bytes_ = str(tmp_path / "runs"), 4 * 300 * 7

    plan = as_json(["plan", "--params", "7e5", "--ranks", "8", "--device-memory", "80M"], capsys)
    assert (plan["params"], plan["ranks"]) == (700_000, 8) and len(plan["ways"]) == 12
    stage_3 = next(way for way in plan["ways"] if way["way"] == "stage 3, float32")
    assert (stage_3["formula"], stage_3["fits"]) == ("16/N", True)
    assert stage_3["call"] == "ShardedAdamW(model, stage=3)"
    assert stage_3["device"] == sum(tiers.get("device", 0) for tiers in stage_3["bytes"].values())
    assert plan["found"]["cheapest that fits"]["fits"] is True

    inspected = as_json(["inspect", runs], capsys)
    tensors = {(each["name"], each["kind"]): each for each in inspected["tensors"]}
    assert tensors["weight", "exp_avg_sq"]["shape"] == [7, 300] and tensors["weight", "exp_avg"]["bytes"] == bytes_
    assert inspected["optimizers"][0]["groups"][0]["lr"] == 0.5 and inspected["extra"] == ["epoch"]
    verified = as_json(["verify", runs], capsys)
    assert verified["whole"] is True and [each["path"] for each in verified["checkpoints"]] == [str(path)]
    exported = as_json(["export", runs, str(tmp_path / "opt.pt"), "--to", "torch"], capsys)
    assert exported["bytes"] == (tmp_path / "opt.pt").stat().st_size and exported["from"] == str(path)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    imported = as_json(
        ["import", str(tmp_path / "opt.pt"), str(tmp_path / "model.pt"), str(tmp_path / "other")], capsys
    )
    assert Path(imported["path"]).parent == tmp_path / "other" and imported["bytes"] >= 3 * bytes_
    assert as_json(["doctor", str(tmp_path)], capsys)["torch"] == torch.__version__
    assert "_shardopt" in as_json(["completion", "zsh"], capsys)["script"]
    twins = run_module("shardopt", "twins", "--optimizer", "SGD", "--steps", "1", "--json")
    assert twins.returncode == 0, twins.stderr
    compared = json.loads(twins.stdout)
    assert compared["equal"] is True and compared["tensors"]["param"]["elements"] == 300 + 1 + 256 + 3 * 256 + 77

    (file,) = path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert main(["verify", runs, "--json"]) == 1
    damaged = json.loads(capsys.readouterr().out)
    assert damaged["whole"] is False and damaged["checkpoints"][0]["problems"]


def completed(script: str, line: str) -> list[str]:
    """What bash offers at the end of a line."""
    words = " ".join(f"'{word}'" for word in line.split(" "))
    ask = f"COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _shardopt; "
    ask += 'printf "%s\\n" "${COMPREPLY[@]}"'
    command = ["bash", "-euc", f"{script}\n{ask}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True, cwd=ROOT)
    return done.stdout.splitlines()


def test_a_shell_completes(capsys: Printed, tmp_path: Path) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert completed(script, "shardopt pl") == ["plan"]
    assert completed(script, "shardopt --") == ["--help", "--version"]
    assert completed(script, "shardopt plan --device") == ["--device-memory"]
    assert completed(script, "shardopt plan --he") == ["--help"]
    assert completed(script, "shardopt plan --master s") == ["split", "split24"]
    assert completed(script, "shardopt import --from d") == ["dcp", "deepspeed"]
    assert completed(script, "shardopt completion ") == ["bash", "zsh", "fish"]
    assert completed(script, "shardopt verify pyproj") == ["pyproject.toml"]
    (tmp_path / "one run").mkdir()
    assert completed(script, f"shardopt verify {tmp_path}/o") == [f"{tmp_path}/one run"]
    assert main(["completion", "fish"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(
        line.startswith("complete -c shardopt -n ") and line.replace("\\'", "").count("'") % 2 == 0 for line in lines
    )
    assert any("__fish_use_subcommand -l version " in line for line in lines)
    assert any("__fish_seen_subcommand_from plan' -l master -x -a 'fp32 split split24 none'" in line for line in lines)


def test_the_script_of_the_package_is_this_command_line() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    entry = importlib.metadata.EntryPoint("shardopt", scripts["shardopt"], "console_scripts")
    assert list(scripts) == ["shardopt"] and entry.load() is main


GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_layer": 2, "n_head": 2}

# A command that may ask for no host, for each folder with a config: how it ended, and what it told.
ALONE = """
import contextlib, io, json, socket, sys
from shardopt.__main__ import main

def asked(host, *_, **__):
    told.write(f"asked for {host}\\n")
    raise OSError("no network")

socket.getaddrinfo = asked
found = []
for folder in sys.argv[1:]:
    with contextlib.redirect_stderr(io.StringIO()) as told, contextlib.redirect_stdout(io.StringIO()):
        found.append((main(["plan", folder]), told.getvalue()))
print(json.dumps(found))
"""


def planned_alone(texts: list[str], folder: Path, **options: Any) -> list[tuple[int, str]]:
    """Of each config: the code that the command ends with, and its errors. One process: transformers takes seconds."""
    (folder / "alone.py").write_text(ALONE)
    folders = [folder / str(number) for number in range(len(texts))]
    for each, text in zip(folders, texts, strict=True):
        each.mkdir()
        (each / "config.json").write_text(text)
    done = run_script(folder / "alone.py", *folders, **options)
    assert done.returncode == 0, done.stderr
    found: list[tuple[int, str]] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="needs the extra 'frameworks'")
def test_a_model_of_hugging_face_is_planned(tmp_path: Path) -> None:
    """From its config alone, with its own shapes; what is none is one line."""
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    done = run_module("shardopt", "plan", str(tmp_path), "--json", "--ranks", "4", frameworks=True)
    assert done.returncode == 0, done.stderr
    block = 2 * 2 * 64 + 64 * 192 + 192 + 64 * 64 + 64 + 2 * 64 * 256 + 256 + 64
    assert json.loads(done.stdout)["params"] == (50257 + 1024) * 64 + 2 * block + 2 * 64  # the head is the embedding
    wrong = {
        json.dumps({**GPT2, "architectures": ["NobodysModel"]}): "cannot build NobodysModel",
        json.dumps({**GPT2, "model_type": "nobodys"}): "cannot build GPT2LMHeadModel",
        json.dumps({**GPT2, "architectures": ["BitsAndBytesConfig"]}): "it is not the class of a model",
        json.dumps({**GPT2, "architectures": 5}): "has 5 as architectures, which is not a list",
        json.dumps({"n_embd": 64}): "has no model_type",
        "[": "give a Hugging Face config.json",
        "[" * 100_000: "give a Hugging Face config.json",
    }
    for (code, told), words in zip(planned_alone([*wrong], tmp_path, frameworks=True), wrong.values(), strict=True):
        assert code == 1 and words in told and len(told.splitlines()) == 1, told


@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="needs the extra 'frameworks'")
def test_a_config_fetches_nothing_and_runs_no_code_of_the_hub(tmp_path: Path) -> None:
    """Neither weights of a backbone nor a kernel for attention, which is code. (Frameworks of tests are offline.)"""
    backbone = {"backbone": "someone/else", "use_timm_backbone": False, "use_pretrained_backbone": True}
    detr = {"model_type": "detr", "architectures": ["DetrForObjectDetection"], **backbone, "backbone_config": None}
    attends = {**GPT2, "_attn_implementation": "someone/else"}
    found = planned_alone([json.dumps(detr), json.dumps(attends)], tmp_path)
    assert [code for code, _ in found] == [1, 0] and not any("asked for" in told for _, told in found), found
