"""The README is true: its links lead somewhere, its commands parse, its examples run."""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hemiola.cli import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


# They need a checkpoint, a server or records, or have tests of their own that take as long.
NOT_RUN = ("quantize", "serve", "load", "doctor", "bench", "gate", "trace", "legs", "report", "selftest")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def commands() -> Iterator[list[str]]:
    """The words of every hemiola command, without what a shell adds around it."""
    for line in "\n".join(blocks("sh")).splitlines():
        words = shlex.split(line, comments=True)
        if "hemiola" in words:
            yield words[words.index("hemiola") + 1 :]


@pytest.fixture
def shipped_text_model(monkeypatch: pytest.MonkeyPatch, text_folder: Path) -> None:
    """A tiny model with a tokenizer in the place of the shipped one."""
    monkeypatch.setattr("hemiola.loading.shipped_model", lambda: text_folder)


def test_it_is_short() -> None:
    assert len(README.splitlines()) < 150


def test_every_link_leads_somewhere() -> None:
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert len(links) > 15
    missing = [link for link in links if "://" not in link and not (ROOT / link).exists()]
    assert missing == []


def test_every_command_has_the_options_it_is_shown_with() -> None:
    shown = list(commands())
    assert {words[0] for words in shown} == {
        "generate", "inspect", "quantize", "serve", "load", "simulate", "doctor", "bench", "gate", "trace", "legs",
        "report", "selftest",
    }  # fmt: skip
    for name, *words in shown:
        help_text = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"}).stdout
        for option in (word for word in words if word.startswith("--")):
            assert f"{option} " in help_text, f"hemiola {name} has no {option}"


@pytest.mark.usefixtures("shipped_text_model")
def test_the_commands_on_the_shipped_model_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").write_text("bada\nfu\n")
    ran = 0
    for words in commands():
        if words[0] in NOT_RUN or "--model" in words:
            continue
        result = CliRunner().invoke(app, words, input="bada fu\n")
        assert result.exit_code == 0, (words, result.stderr)
        ran += 1
    assert ran == 5


@pytest.mark.usefixtures("shipped_text_model")
def test_the_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (source,) = blocks("python")
    exec(compile(source, "README.md", "exec"), {})
    assert len(capsys.readouterr().out) > 40


def test_the_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"make (\w+) ", README)) - {"it"}:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_defaults_are_those_of_the_code() -> None:
    from hemiola import EngineConfig, SamplingParams

    assert f"| max_tokens | {SamplingParams().max_tokens} |" in README
    assert f"| {EngineConfig().max_num_seqs}, {EngineConfig().max_num_batched_tokens} |" in README
    assert "| temperature | 0: greedy" in README
    assert SamplingParams().is_greedy
    assert inspect.signature(EngineConfig).parameters["dtype"].default == "auto"
