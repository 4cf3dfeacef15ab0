"""`hemiola generate` through typer's runner, and as a process of its own where streams and signals matter."""

from __future__ import annotations

import json
import math
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from hemiola import LLM, SamplingParams, __version__
from hemiola.cli import app
from hemiola.cli.answers import write_json
from hemiola.cli.ending import FAILED, INTERRUPTED, PIPE_CLOSED, REFUSED
from hemiola.llm import CompletionOutput, RequestOutput

PROMPTS = ["bada fu", "kan", "zi do re mi"]


def run(*arguments: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, ["generate", *map(str, arguments)], input=stdin)


def process(*arguments: object, **options: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "hemiola", "generate", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, **options)


def objects(stdout: str) -> list[dict[str, Any]]:
    """Every line of stdout as JSON; anything else in it fails here."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    assert stdout.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in stdout.removesuffix("\n").split("\n")]


def write_ids(folder: Path, prompts: list[list[int]]) -> Path:
    file = folder / "ids.json"
    file.write_text(json.dumps(prompts))
    return file


@pytest.fixture(scope="module")
def expected(text_folder: Path) -> list[RequestOutput]:
    """What the Python API answers to PROMPTS."""
    return LLM(text_folder).generate(PROMPTS, SamplingParams(max_tokens=12, ignore_eos=True))


def test_json_from_a_process_is_alone_on_stdout(text_folder: Path, expected: list[RequestOutput]) -> None:
    options = ("--max-tokens", 12, "--ignore-eos", "--logprobs", 5, "--prompt-logprobs", 5, "--json")
    prompts = [argument for prompt in PROMPTS for argument in ("--prompt", prompt)]
    child = process("--model", text_folder, *prompts, *options, stdout=subprocess.PIPE)
    stdout, stderr = child.communicate(timeout=120)
    assert child.returncode == 0, stderr.decode()
    lines = objects(stdout.decode("ascii"))
    assert "tokens/s" in stderr.decode()
    assert "reference arm: " in stderr.decode()
    assert len(lines) == len(expected)
    for line, output in zip(lines, expected, strict=True):
        names = ["prompt_ids", "output_ids", "text", "finish_reason", "logprobs", "prompt_logprobs"]
        assert list(line) == names
        assert line["prompt_ids"] == output.prompt_token_ids
        assert line["output_ids"] == output.outputs[0].token_ids
        assert line["text"] == output.outputs[0].text
        assert line["finish_reason"] == "length"
        assert len(line["logprobs"]) == 12
        assert line["prompt_logprobs"][0] is None
        assert len(line["prompt_logprobs"]) == len(output.prompt_token_ids)
        for token, position in zip(line["output_ids"], line["logprobs"], strict=True):
            assert len(position) == 5
            assert position[0][0] == token, "greedy takes the best"
            values = [value for _, value in position]
            assert values == sorted(values, reverse=True)


def test_json_floats_are_exact_and_infinity_is_null(capsys: pytest.CaptureFixture[str]) -> None:
    position = [(3, -0.1234567890123456789), (4, -math.inf), (5, math.nan)]
    choices = [CompletionOutput(i, "é\n", [3], [position], "stop", None) for i in range(2)]
    write_json([RequestOutput("request-0", None, [1, 2], [None, position], choices)])
    first, second = objects(capsys.readouterr().out)
    assert first["logprobs"] == [[[3, -0.1234567890123456789], [4, None], [5, None]]]
    assert first["prompt_logprobs"] == [None, first["logprobs"][0]]
    assert first["text"] == "é\n"
    assert (first["choice"], second["choice"]) == (0, 1)


def test_without_logprobs_json_has_null(text_folder: Path) -> None:
    (line,) = objects(run("--model", text_folder, "--prompt", "kan", "--max-tokens", 2, "--json").stdout)
    assert line["logprobs"] is None
    assert line["prompt_logprobs"] is None
    assert "choice" not in line


def test_one_prompt_streams_what_the_batch_answers(text_folder: Path, expected: list[RequestOutput]) -> None:
    for prompt, output in zip(PROMPTS, expected, strict=True):
        result = run("--model", text_folder, "--prompt", prompt, "--max-tokens", 12, "--ignore-eos")
        assert result.stdout == output.outputs[0].text + "\n"
        assert re.search(r"prompt tokens, [\d.]+ tokens/s prefill .*; 12 tokens, 11 after the first", result.stderr)
        assert re.search(r"; float32; reference arm: \d+ ops, [\d,]+ calls\n$", result.stderr)


def test_the_stream_writes_while_it_generates(text_folder: Path, expected: list[RequestOutput]) -> None:
    pieces: list[str] = []
    result = CliRunner()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hemiola.cli.answers._write_text", pieces.append)
        result.invoke(
            app, ["generate", "--model", str(text_folder), "--prompt", "kan", "--max-tokens", "12", "--ignore-eos"]
        )
    assert len(pieces) > 4
    assert "".join(pieces) == expected[1].outputs[0].text + "\n"


def test_the_shipped_model_is_the_default() -> None:
    """It writes words of English."""
    (line,) = objects(run("--prompt", "It was a fine morning, and", "--max-tokens", 24, "--json").stdout)
    assert len(line["output_ids"]) == 24
    words = re.findall("[a-z]+", line["text"].lower())
    assert {"the", "and", "of", "to", "a", "was", "i", "he", "she", "it", "in"} & set(words)


def test_standard_input_is_the_prompt(text_folder: Path, expected: list[RequestOutput]) -> None:
    result = run("--model", text_folder, "--max-tokens", 12, "--ignore-eos", stdin=PROMPTS[2] + "\n")
    assert result.stdout == expected[2].outputs[0].text + "\n"


def test_a_prompt_file_runs_as_one_batch_in_order(
    text_folder: Path, tmp_path: Path, expected: list[RequestOutput]
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS * 7))
    options = ("--max-tokens", 12, "--ignore-eos", "--max-num-seqs", 4, "--max-num-batched-tokens", 7)
    result = run("--model", text_folder, "--prompt-file", file, *options, "--json")
    assert [line["text"] for line in objects(result.stdout)] == [o.outputs[0].text for o in expected] * 7
    assert "21 prompts together" in result.stderr
    plain = run("--model", text_folder, "--prompt-file", file, *options)
    assert plain.stdout == "".join(output.outputs[0].text + "\n" for output in expected * 7)


def test_ids_work_without_a_tokenizer(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    folder, prompts = tiny_folder("M*E-"), [[7, 8, 9], [10]]
    expected = LLM(folder).generate(prompts, SamplingParams(max_tokens=4, ignore_eos=True))
    file, options = write_ids(tmp_path, prompts), ("--max-tokens", 4, "--ignore-eos")
    lines = objects(run("--model", folder, "--prompt-ids", file, *options, "--json").stdout)
    assert [line["prompt_ids"] for line in lines] == prompts
    assert [line["output_ids"] for line in lines] == [output.outputs[0].token_ids for output in expected]
    assert [line["text"] for line in lines] == ["", ""]
    plain = run("--model", folder, "--prompt-ids", write_ids(tmp_path, prompts[:1]), *options)
    assert list(map(int, plain.stdout.split())) == expected[0].outputs[0].token_ids


def test_n_choices_have_an_object_each(text_folder: Path) -> None:
    options = ("--prompt", "kan", "--n", 3, "--temperature", 1, "--seed", 5, "--max-tokens", 8, "--json")
    lines = objects(run("--model", text_folder, *options).stdout)
    assert [line["choice"] for line in lines] == [0, 1, 2]
    assert len({tuple(line["output_ids"]) for line in lines}) > 1


def test_a_seed_repeats_a_prompt_alone_and_among_others(text_folder: Path) -> None:
    def ids(seed: int, *prompts: str) -> list[list[int]]:
        options = ("--temperature", 1, "--max-tokens", 8, "--seed", seed, "--json")
        arguments = [argument for prompt in prompts for argument in ("--prompt", prompt)]
        return [line["output_ids"] for line in objects(run("--model", text_folder, *arguments, *options).stdout)]

    assert ids(5, "bada", "kan")[1] == ids(5, "kan")[0]
    assert ids(5, "kan") != ids(6, "kan")


def test_sampling_options_reach_the_request(text_folder: Path) -> None:
    def ids(*options: object) -> list[int]:
        prompt = ("--prompt", "kan", "--max-tokens", 6, "--json")
        (line,) = objects(run("--model", text_folder, *prompt, *options).stdout)
        found: list[int] = line["output_ids"]
        return found

    greedy = ids("--ignore-eos")
    assert ids("--logit-bias", "300=100", "--logit-bias", "301=-100") == [300] * 6
    assert ids("--stop-token-id", greedy[2]) == greedy[: greedy.index(greedy[2]) + 1]
    assert ids("--stop-token-id", greedy[0], "--min-tokens", 3)[0] != greedy[0]
    assert len(ids("--logit-bias", "2=100")) == 1
    assert ids("--logit-bias", "2=100", "--ignore-eos") == [2] * 6


def test_chat_goes_through_the_template(text_folder: Path) -> None:
    expected = LLM(text_folder).chat([{"role": "user", "content": "bada"}], SamplingParams(max_tokens=5))[0]
    (line,) = objects(run("--model", text_folder, "--chat", "--prompt", "bada", "--max-tokens", 5, "--json").stdout)
    assert line["prompt_ids"] == expected.prompt_token_ids
    assert line["output_ids"] == expected.outputs[0].token_ids


def test_notes_go_to_stderr(text_folder: Path) -> None:
    result = run("--model", text_folder, "--prompt", "kan", "--max-tokens", 1, "--cache-bytes", "64KiB", "--json")
    assert re.search(r"^note: max_num_seqs 16 clamped to \d+: ", result.stderr, re.MULTILINE)
    objects(result.stdout)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "./nowhere", "--prompt", "a"], "error: ./nowhere: no such model folder; expected a folder"),
        (["--prompt", "a", "--temperature", "-1"], "error: temperature: out of range; found -1.0; expected"),
        (["--prompt", "a", "--max-tokens", "5000"], "error: request-0.0: longer than the model allows; found 1 prompt"),
        (["--prompt", "a", "--logit-bias", "576=1"], "error: logit_bias[576]: no such token id; found 576; expected"),
        (["--prompt", "a", "--dtype", "int4"], "error: dtype: unknown value; found 'int4'; expected one of auto"),
        (["--prompt", "a", "--arms", "linear=gpu"], "error: arms: "),
        (["--prompt", "a", "--arms", "device"], "error: "),
        (["--prompt", "a", "--cache-bytes", "1KiB"], "error: cache_bytes: the cache budget holds not even one"),
        (["--prompt-file", "./none.txt"], "error: ./none.txt: cannot be read; found No such file or directory"),
        (["--prompt", "a", "--prompt-ids", "b"], "error: prompts from more than one source; found --prompt and"),
        (["--prompt-ids", "b", "--chat"], "error: b: cannot be read"),
        (["--prompt", ""], "error: request-0.0: the prompt is empty; expected at least one token"),
    ],
)
def test_a_mistake_is_one_sentence(text_folder: Path, options: list[str], message: str) -> None:
    result = run(*(() if "--model" in options else ("--model", text_folder)), *options)
    assert result.exit_code == REFUSED
    assert result.stdout == ""
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-tokens", "many"], "Invalid value for '--max-tokens'"),
        (["--cache-bytes", "5q"], "'5q' is no number of bytes"),
        (["--logit-bias", "5"], "'5' is not of the form"),
        (["--no-such-option"], "No such option"),
    ],
)
def test_wrong_usage_is_typers_own(options: list[str], message: str) -> None:
    result = run("--prompt", "a", *options)
    assert result.exit_code == REFUSED
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_ids_and_a_model_without_tokenizer_are_told_apart(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    file = write_ids(tmp_path, [[1]])
    for options, message in (
        (["--prompt", "a"], "a text prompt needs a tokenizer"),
        (["--prompt", "a", "--chat"], "chat needs a tokenizer"),
        (["--prompt-ids", file, "--chat"], "a chat template needs text"),
        (["--prompt-ids", file, "--stop", "x"], "stop strings need a tokenizer"),
    ):
        result = run("--model", tiny_folder("M*E-"), *options)
        assert (result.exit_code, result.stderr.count("\n")) == (REFUSED, 1)
        assert message in result.stderr


def test_a_full_disk_is_no_traceback(text_folder: Path) -> None:
    with open("/dev/full", "wb") as full:
        child = process("--model", text_folder, "--prompt", "kan", "--max-tokens", 2, stdout=full)
        _, stderr = child.communicate(timeout=120)
    assert child.returncode == FAILED
    assert stderr.decode() == "error: [Errno 28] No space left on device\n"


def test_a_closed_pipe_ends_quietly(text_folder: Path) -> None:
    child = process("--model", text_folder, "--prompt", "kan", "--max-tokens", 2, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.close()
    with child.stderr:
        assert child.stderr.read() == b""
    assert child.wait(timeout=120) == PIPE_CLOSED


def test_an_interrupt_ends_quietly(text_folder: Path) -> None:
    options = ("--max-tokens", 4000, "--ignore-eos")
    child = process("--model", text_folder, "--prompt", "kan", *options, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.read(1), "it has begun"
    child.send_signal(signal.SIGINT)
    _, stderr = child.communicate(timeout=120)
    assert child.returncode == INTERRUPTED
    assert stderr == b""


def test_a_terminal_shows_the_prompt_dim_and_obeys_no_control_characters(
    text_folder: Path, expected: list[RequestOutput]
) -> None:
    controller, terminal = pty.openpty()
    prompt = "kan"
    child = process("--model", text_folder, "--prompt", prompt, "--max-tokens", 12, "--ignore-eos", stdout=terminal)
    os.close(terminal)
    shown = b""
    while True:
        try:
            part = os.read(controller, 1024)
        except OSError:  # the terminal's other end is closed
            break
        if not part:
            break
        shown += part
    os.close(controller)
    _, stderr = child.communicate(timeout=120)
    assert child.returncode == 0, stderr.decode()
    text = shown.decode().replace("\r\n", "\n")
    assert text.startswith(f"\x1b[2m{prompt}\x1b[0m")
    answer = text.removeprefix(f"\x1b[2m{prompt}\x1b[0m").removesuffix("\n")
    assert re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", answer) is None
    assert len(answer) == len(expected[1].outputs[0].text)


def test_version_and_help() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == f"hemiola {__version__}\n"
    result = CliRunner().invoke(app, ["generate", "--help"], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    for name in ("--max-num-batched-tokens", "--include-stop-str-in-output", "--keep-special-tokens", "--no-strict"):
        assert name in result.stdout, "a terminal of 80 columns shows it whole"


def test_help_loads_no_torch() -> None:
    code = "import sys, hemiola.cli; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
