"""The command line, on a model that needs no weights."""

import json
import subprocess
import sys

import pytest
from table import TableLM, random_table

import smcdecode as smc
from smcdecode import cli
from smcdecode.distill.loss import Agreement
from smcdecode.errors import UnsupportedModel

EOS = 3
MODELS = {
    "p": TableLM(random_table(1, 4, floor=0.5), eos=[EOS], name="p"),
    "q": TableLM(random_table(2, 4, floor=0.5), eos=[EOS], name="q"),
}


class Letters:
    """A tokenizer: a is 0, b is 1, …; one message of a chat is its content."""

    chat_template = "yes"

    def __call__(self, text):
        return {"input_ids": [ord(c) - ord("a") for c in text]}

    def apply_chat_template(self, messages, *, add_generation_prompt, return_dict):
        return self("".join(message["content"] for message in messages) + "c")


def run(line):
    return cli.main(line.split())


def grow(target, out, **options):
    grown.append((target, out, options))
    return Agreement(0.5, 2.0, 0.25)


grown = []


def load(name):
    if name not in MODELS:
        raise UnsupportedModel(f"no model is called {name}")
    return MODELS[name]


@pytest.fixture(autouse=True)
def models(monkeypatch):
    monkeypatch.setattr(cli, "load", load)
    monkeypatch.setattr(cli, "grow_draft", grow)
    for model in MODELS.values():
        monkeypatch.setattr(model, "tokenizer", Letters())


def test_generate_prints_the_text_and_its_summary_apart(capsys):
    arguments = "generate --target p --draft q --block 2 --particles 4 --alpha 2 --prompt ab --max-tokens 6 --seed 3"
    assert run(arguments) == 0
    out, err = capsys.readouterr()
    method = smc.SMC(smc.Draft(MODELS["q"], 2), 4)
    expected = smc.sample(MODELS["p"] ** 2, "ab", method=method, max_tokens=6, seed=3, progress=False)
    assert out == expected.text + "\n"
    assert "p ** 2" in err and "Draft(model=q, block=2" in err and "ESS" in err


def test_generate_json_is_the_whole_posterior(capsys):
    assert run("generate --target p --prompt a --max-tokens 5 --seed 1 --json") == 0
    posterior = smc.Posterior.from_json(capsys.readouterr().out)
    assert posterior.N == 8 and posterior.asked.seed == 1 and posterior.log_z == pytest.approx(0)


def test_generate_passes_every_option_on(capsys):
    options = (
        "--strictness 0.5 --temperature 0.7 --top-k 3 --top-p 0.9 --resampling ssp --threshold 0.9 --bridge 2 --alpha 3"
    )
    assert run(f"generate --target p --draft q --prompt a --max-tokens 4 --json {options}") == 0
    asked = json.loads(capsys.readouterr().out)["posterior"]["asked"]
    assert asked["target"] == "p.at(temperature=0.7, top_k=3, top_p=0.9) ** 3"
    assert asked["method"] == (
        "SMC(proposal=Draft(model=q, block=4, strictness=0.5), particles=8, resampling='ssp', threshold=0.9, bridge=2, "
        "overlap=False)"
    )


def test_generate_streams_the_text_that_it_would_print(capsys):
    arguments = "generate --target p --draft q --particles 4 --alpha 2 --prompt ab --max-tokens 9 --seed 9"
    assert run(arguments) == 0
    whole, told = capsys.readouterr()
    assert run(f"{arguments} --stream") == 0
    streamed, summary = capsys.readouterr()
    assert streamed == whole and len(whole) > 3
    assert summary.splitlines()[:5] == told.splitlines()[:5]  # further down are times


def test_generate_stops_behind_a_text(capsys):
    arguments = "generate --target p --particles 4 --prompt ab --max-tokens 40 --seed 5"
    assert run(f"{arguments} --stop cc --stop b") == 0
    out, _ = capsys.readouterr()
    expected = smc.sample(
        MODELS["p"], "ab", method=smc.SMC(particles=4), max_tokens=40, seed=5, stop=["cc", "b"], progress=False
    )
    assert out == expected.text + "\n"
    run(arguments)
    assert capsys.readouterr().out != out  # it would have gone on


def test_json_cannot_be_streamed(capsys):
    with pytest.raises(SystemExit):
        run("generate --target p --prompt ab --json --stream")
    assert "not allowed with" in capsys.readouterr().err


def test_a_prompt_can_be_a_chat_message_or_come_from_stdin(capsys, monkeypatch):
    assert run("generate --target p --prompt ab --chat --json --max-tokens 3") == 0
    assert json.loads(capsys.readouterr().out)["posterior"]["asked"]["prompt_tokens"] == [0, 1, 2]
    monkeypatch.setattr("sys.stdin.read", lambda: "ba", raising=False)
    assert run("generate --target p --prompt - --json --max-tokens 3") == 0
    assert json.loads(capsys.readouterr().out)["posterior"]["asked"]["prompt_tokens"] == [1, 0]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--target nobody --prompt a", "no model is called nobody"),
        ("--target p --prompt a --alpha 0", "alpha > 0"),
        ("--target p --draft q --prompt a --strictness 2", "strictness must lie in"),
    ],
)
def test_refusals_are_one_line_on_stderr(capsys, arguments, reason):
    assert cli.main(["generate", *arguments.split()]) == cli.FAILED
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("smcdecode: ") and reason in err


def test_a_run_without_survivors_has_its_own_exit_code(capsys, monkeypatch):
    never = smc.potential(lambda text: float("-inf"), name="never")
    monkeypatch.setattr(cli, "_run", lambda target, method, options: smc.sample(target * never, "a", method=method))
    assert run("generate --target p --prompt a") == cli.NO_TEXT
    assert "never: 8 died" in capsys.readouterr().err
    assert run("generate --target p --prompt a --json") == cli.NO_TEXT


def test_demo_runs_a_power_target(capsys, monkeypatch):
    monkeypatch.setitem(MODELS, "demo", MODELS["p"])
    assert run("demo --prompt ab --max-tokens 8") == 0
    first, err = capsys.readouterr()
    assert "p ** 2" in err and "ESS" in err
    assert run("demo --prompt ab --max-tokens 8") == 0
    assert capsys.readouterr().out == first


def test_a_command_is_required(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main([])
    assert caught.value.code == 2 and "COMMAND" in capsys.readouterr().err


def test_distill_hands_its_options_on_and_says_how_good_the_draft_is(tmp_path, capsys):
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\ntwo\n")
    assert run(f"distill --target p --out d --layers 2 --tokens 50 --passes 3 --prompts {file} --seed 7") == 0
    options = {"layers": 2, "tokens": 50, "passes": 3, "prompts": ["one", "two"], "seed": 7}
    assert grown.pop() == ("p", "d", options)
    assert capsys.readouterr().out == "d: on text held out, acceptance 0.500, χ² 2, KL 0.250\n"
    assert run(f"distill --target p --out d --prompts {file} --chat") == 0
    assert grown.pop()[2]["prompts"][1] == [{"role": "user", "content": "two"}]
    assert run("distill --target p --out d --prompts nowhere.txt") == 2
    assert "one prompt a line" in capsys.readouterr().err


def test_serve_passes_its_options_on(monkeypatch):
    serving, asked = pytest.importorskip("smcdecode.integrations.server.serving"), {}
    monkeypatch.setattr(serving, "run", lambda p, method, **options: asked.update(options, p=p, method=method))
    line = "serve --target p --draft q --block 3 --strictness 0.5 --particles 4 --host 0.0.0.0 --port 0 --api-key k"
    assert run(f"{line} --memory 1e9 --lanes 2 --queue 9 --max-tokens 50 --drain 5 --name it") == 0
    assert asked == {
        "p": MODELS["p"], "method": smc.SMC(smc.Draft(MODELS["q"], 3, strictness=0.5), 4), "name": "it",
        "limits": {"lanes": 2, "queue": 9, "max_tokens": 50}, "memory": 1e9, "host": "0.0.0.0", "port": 0,
        "api_key": "k", "drain": 5,
    }  # fmt: skip
    assert run("serve --target p") == 0
    assert (asked["host"], asked["limits"], asked["method"]) == ("127.0.0.1", {}, smc.SMC(smc.Local(), 8))


def test_serve_without_its_extra_names_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "smcdecode.integrations.server.serving", None)
    assert run("serve --target p") == cli.FAILED
    assert "install smcdecode[serve]" in capsys.readouterr().err


def test_replicas_are_not_split(capsys):
    assert run("serve --target p --parallel --ray") == cli.FAILED
    assert "--ray gives each replica a whole one" in capsys.readouterr().err


def test_the_package_is_a_command():
    found = subprocess.run([sys.executable, "-m", "smcdecode", "--help"], capture_output=True, text=True, check=True)
    assert "generate" in found.stdout and "serve" in found.stdout
