"""Distillation: its loss is the divergence it claims, killed runs go on as if nothing had been, and the draft loads."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from models import tiny

import smcdecode as smc
from smcdecode.distill.corpus import Corpus
from smcdecode.distill.distill import distill
from smcdecode.distill.loss import Agreement, compare, divergence, subset
from smcdecode.distill.training import Trainer, grow
from smcdecode.engine.load import load

PROMPTS = [[5, 9], [2, 7, 3], [4], [11, 6], [8, 8]]
SIZES = {"layers": 1, "tokens": 800, "passes": 2, "prompts": PROMPTS, "progress": False}


def test_the_loss_is_the_divergence_and_so_is_its_gradient():
    generator = torch.Generator().manual_seed(0)
    hidden, teacher, head = (torch.randn(n, 6, generator=generator) for n in (7, 7, 40))
    hidden.requires_grad_(True)
    value = divergence(hidden, teacher, head, torch.zeros(40))
    (slope,) = torch.autograd.grad(value, hidden)
    log_p, log_q = ((x @ head.T).log_softmax(-1) for x in (teacher, hidden))
    plain = torch.nn.functional.kl_div(log_q, log_p, log_target=True, reduction="batchmean")
    torch.testing.assert_close(value, plain)
    torch.testing.assert_close(slope, torch.autograd.grad(plain, hidden)[0])
    torch.testing.assert_close(Agreement.of(compare(log_p, log_q.detach())).kl, plain.item())


def test_a_few_ids_stand_for_all():
    frequency = torch.tensor([0.0, 5.0, 1.0, 0.0, 9.0, 0.0])
    ids, log_share = subset(frequency, 2, 2, torch.Generator().manual_seed(0))
    assert ids[:2].tolist() == [4, 1] and set(ids[2:].tolist()) < {0, 2, 3, 5}
    torch.testing.assert_close(log_share.exp(), torch.tensor([1.0, 1.0, 2.0, 2.0]))
    everything, shares = subset(frequency, 4, 2, torch.Generator())
    assert sorted(everything.tolist()) == list(range(6)) and not shares.any()


def test_agreement_is_worked_out_by_hand():
    p, q = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0.25, 0.5, 0.25]])
    found = Agreement.of(compare(p.log(), q.log()))
    assert found.acceptance == pytest.approx(0.75) and found.chi2 == pytest.approx(0.5)
    assert found.kl == pytest.approx(0.5 * torch.tensor(2.0).log().item())


def test_a_draft_grows_from_both_ends_and_shares_the_rest():
    module = tiny("llama")
    draft = grow(module, 1)
    assert draft.config.num_hidden_layers == 1 and module.config.num_hidden_layers == 2
    assert draft.get_input_embeddings().weight.data_ptr() == module.get_input_embeddings().weight.data_ptr()
    trained = {name for name, p in draft.named_parameters() if p.requires_grad}
    assert trained and not any("embed" in name or "lm_head" in name for name in trained)
    assert draft.model.layers[0].mlp.up_proj.weight.data_ptr() != module.model.layers[0].mlp.up_proj.weight.data_ptr()


def test_training_brings_the_draft_nearer_on_text_held_out(tmp_path):
    module = tiny("qwen3", vocab=12)
    corpus = Corpus(tmp_path, load(module), module, PROMPTS, 0)
    test, train = corpus.read(1)
    trainer = Trainer(grow(module, 1), train, test, 40)
    before = trainer.measure()
    losses = list(trainer.run())
    after = trainer.measure()
    assert sum(losses[-10:]) < sum(losses[:10])
    assert after.acceptance > before.acceptance and after.kl < before.kl and after.chi2 < before.chi2


COMMAND = """
import sys, time
sys.path.append("tests")
from models import tiny
from smcdecode.distill import distill as d
from smcdecode.distill.training import Trainer
from test_distill import SIZES
d.SAVE, step = 4, Trainer._loss
Trainer._loss = lambda self, batch: (time.sleep(0.1), step(self, batch))[1]
d.distill(tiny("llama"), sys.argv[1], **SIZES)
"""


def test_a_killed_distillation_goes_on_and_ends_alike(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    state = killed / "work" / "state.pt"
    victim = subprocess.Popen([sys.executable, "-c", COMMAND, str(killed)], cwd=Path(__file__).parents[1])
    distill(tiny("llama"), whole, **SIZES)
    while not state.exists():
        assert victim.poll() is None
        time.sleep(0.02)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    reached = torch.load(state, weights_only=True)["step"]
    assert reached > 0 and not (killed / "model.safetensors").exists()
    distill(tiny("llama"), killed, **SIZES)
    assert (whole / "model.safetensors").read_bytes() == (killed / "model.safetensors").read_bytes()
    draft, p = smc.load(killed), smc.load(tiny("llama"))
    method = smc.SMC(smc.Draft(draft, 2), particles=4)
    out = smc.sample(p, [5, 9], method=method, max_tokens=8, seed=0, progress=False)
    assert out.alive and out.stats.draft_passes


def test_what_it_cannot_do_is_refused_before_anything_is_written(tmp_path):
    module = tiny("llama")
    for wrong, message in (({"layers": 2}, "layers"), ({"tokens": 0}, "tokens"), ({"passes": 0.5}, "passes")):
        with pytest.raises(smc.InvalidOption, match=message):
            distill(module, tmp_path / "x", **{**SIZES, **wrong})
    with pytest.raises(smc.PromptError, match="no tokenizer"):
        distill(module, tmp_path / "x", layers=1)
    with pytest.raises(smc.UnsupportedModel, match="logits"):
        distill(tiny("gemma2"), tmp_path / "x", **SIZES)
    assert not (tmp_path / "x").exists()


def test_another_draft_does_not_grow_in_the_same_folder(tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "settings.json").write_text('{"layers": 3, "seed": 0}')
    with pytest.raises(smc.InvalidOption, match="delete it or name another"):
        distill(tiny("llama"), tmp_path, **SIZES)
