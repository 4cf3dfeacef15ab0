"""The training model: its chunked scan against the written-out recurrence, its export, its roundings."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from training.export import config_dict, load_checkpoint, model_config, public_tensors, shipped_bytes, write_checkpoint
from training.model import Gate, Mamba2, ModelConfig, NemotronH, ssd_scan
from training.rounding import Rounding, round_fp8, round_nvfp4

_TINY = ModelConfig(
    pattern="ME*", vocab_size=64, hidden_size=32, mamba_num_heads=4, mamba_head_dim=8, n_groups=2, ssm_state_size=16,
    chunk_size=8, num_attention_heads=2, num_key_value_heads=1, head_dim=16, n_routed_experts=4, num_experts_per_tok=2,
    moe_intermediate_size=16, shared_intermediate_size=32,
)  # fmt: skip


def _recurrence(x, dt, a, b, c):
    """One token at a time, one head at a time."""
    batch, tokens, heads, head_dim = x.shape
    per = heads // b.shape[2]
    y = torch.zeros_like(x)
    for row in range(batch):
        for head in range(heads):
            state = torch.zeros(head_dim, b.shape[3], dtype=x.dtype)
            for t in range(tokens):
                fed = dt[row, t, head] * torch.outer(x[row, t, head], b[row, t, head // per])
                state = torch.exp(a[head] * dt[row, t, head]) * state + fed
                y[row, t, head] = state @ c[row, t, head // per]
    return y


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 24, 29])
def test_chunked_scan_equals_recurrence(tokens):
    g = torch.Generator().manual_seed(tokens)
    x = torch.randn(2, tokens, 4, 3, generator=g, dtype=torch.float64)
    b, c = (torch.randn(2, tokens, 2, 5, generator=g, dtype=torch.float64) for _ in range(2))
    dt = torch.rand(2, tokens, 4, generator=g, dtype=torch.float64)
    a = -torch.rand(4, generator=g, dtype=torch.float64) * 3
    torch.testing.assert_close(ssd_scan(x, dt, a, b, c, chunk=8), _recurrence(x, dt, a, b, c), atol=1e-10, rtol=1e-10)


def test_scan_gradient_is_finite_under_strong_decay():
    dt = torch.full((1, 20, 4), 50.0, requires_grad=True)
    b = torch.ones(1, 20, 2, 5)
    ssd_scan(torch.ones(1, 20, 4, 3), dt, torch.full((4,), -16.0), b, b, chunk=8).sum().backward()
    assert dt.grad is not None
    assert dt.grad.isfinite().all()


def test_mixer_is_causal():
    torch.manual_seed(0)
    mixer = Mamba2(_TINY, Rounding("fp8"))
    x = torch.randn(1, 20, 32)
    changed = x.clone()
    changed[0, 13] += 1
    before, after = mixer(x), mixer(changed)
    torch.testing.assert_close(before[:, :13], after[:, :13])
    assert (before[:, 13:] - after[:, 13:]).abs().amax(-1).gt(1e-6).all()


def test_gate_bias_selects_but_does_not_weigh():
    torch.manual_seed(0)
    gate = Gate(_TINY)
    gate.e_score_correction_bias[:2] += 10
    weights, load = gate(torch.randn(1, 6, 32))
    assert load.tolist() == [6, 6, 0, 0]
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 6))
    assert weights[..., :2].max() < 0.6


def test_balance_lifts_idle_experts():
    model = NemotronH(_TINY)
    model.balance(torch.tensor([[8.0, 0.0, 4.0, 4.0]]), rate=0.5)
    assert model.backbone.layers[1].mixer.gate.e_score_correction_bias.tolist() == [-0.5, 0.5, 0.0, 0.0]


def test_config_round_trip():
    config = replace(_TINY, routed_scaling_factor=1.75)
    raw = json.loads(json.dumps(config_dict(config, 4096)))
    assert model_config(raw) == config
    assert raw["time_step_limit"] == [0.0, float("inf")]
    assert raw["num_hidden_layers"] == 3


def test_checkpoint_round_trip(tmp_path: Path):
    torch.manual_seed(0)
    model = NemotronH(_TINY)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text("{}")
    write_checkpoint(model, tmp_path, tmp_path / "out", 64)
    loaded = load_checkpoint(tmp_path / "out")
    for name, value in model.state_dict().items():
        expected = value if ".gate." in name else value.bfloat16().float()
        assert torch.equal(loaded.state_dict()[name], expected), name
    tensors = public_tensors(model)
    assert tensors["backbone.layers.1.mixer.experts.3.down_proj.weight"].shape == (32, 16)
    assert tensors["backbone.layers.1.mixer.shared_experts.up_proj.weight"].shape == (32, 32)
    assert tensors["backbone.layers.0.mixer.conv1d.weight"].shape == (96, 1, 4)
    assert tensors["backbone.layers.1.mixer.gate.weight"].dtype == torch.float32


def test_shipped_bytes_counts_each_format():
    tensors = {"lm_head.weight": torch.zeros(64, 32), "a.in_proj.weight": torch.zeros(64, 32)}
    assert shipped_bytes(tensors) == (1152 + 110 + 353) + (2048 + 110 + 238)
    with pytest.raises(ValueError, match="multiple of 16"):
        shipped_bytes({"lm_head.weight": torch.zeros(64, 40)})


def test_roundings_hold_representable_values_and_pass_gradients():
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -6.0, -0.5, 0.5, 1.0, -1.5, 2.0, -3.0, 4.0])
    w = torch.stack([grid, grid * 4])
    torch.testing.assert_close(round_nvfp4(w * 448), w * 448)
    noisy = w + 0.2
    assert not torch.equal(round_nvfp4(noisy), noisy)
    torch.testing.assert_close(round_nvfp4(round_nvfp4(noisy)), round_nvfp4(noisy))
    exact = torch.tensor([[28.0, 1.5, -0.25, 13.0]])
    assert torch.equal(round_fp8(exact), exact)
    rounding, leaf = Rounding("nvfp4"), noisy.clone().requires_grad_()
    assert torch.equal(rounding(leaf), leaf)
    rounding.share.fill_(1.0)
    rounding(leaf).sum().backward()
    assert torch.equal(leaf.grad, torch.ones_like(leaf))
