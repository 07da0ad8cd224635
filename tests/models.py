"""Tiny random checkpoints of the supported families, and of some that must be refused."""

import torch
import transformers as tr

COMMON = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
}


def _config(family: str, vocab: int):
    common = {**COMMON, "vocab_size": vocab}
    sliding = ["sliding_attention", "full_attention"]
    match family:
        case "llama":
            return tr.LlamaConfig(**common)
        case "qwen2":
            return tr.Qwen2Config(**{k: v for k, v in common.items() if k != "head_dim"})
        case "qwen3":
            return tr.Qwen3Config(**common)
        case "mistral":
            return tr.MistralConfig(**common, sliding_window=5)
        case "gemma3":
            return tr.Gemma3TextConfig(**common, sliding_window=5, layer_types=sliding, query_pre_attn_scalar=8)
        case "gemma2":
            return tr.Gemma2Config(
                **common,
                sliding_window=5,
                layer_types=sliding,
                query_pre_attn_scalar=8,
                attn_logit_softcapping=2.0,
                final_logit_softcapping=5.0,
            )
        case "phi3":
            return tr.Phi3Config(**{k: v for k, v in common.items() if k != "head_dim"}, sliding_window=7)
        case "longrope":
            rope = {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.1, 1.2],
                "long_factor": [2.0, 3.0, 4.0],
                "original_max_position_embeddings": 64,
            }
            names = {k: v for k, v in common.items() if k != "head_dim"}
            return tr.Phi3Config(**names, rope_parameters=rope, original_max_position_embeddings=64)
        case "yarn":
            rope = {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
            return tr.LlamaConfig(**common, rope_parameters=rope)
        case "gpt2":
            return tr.GPT2Config(
                vocab_size=vocab, n_embd=24, n_layer=2, n_head=4, n_positions=256, bos_token_id=None, eos_token_id=1
            )
        case "olmo2":
            return tr.Olmo2Config(**{k: v for k, v in common.items() if k != "head_dim"})
        case "mixtral":
            return tr.MixtralConfig(**common, num_local_experts=3, num_experts_per_tok=2)
        case "t5":
            return tr.T5Config(vocab_size=vocab, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
        case "mamba":
            return tr.MambaConfig(vocab_size=vocab, hidden_size=16, num_hidden_layers=1, state_size=4)
        case "recurrentgemma":
            return tr.RecurrentGemmaConfig(
                vocab_size=vocab, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
                lru_width=16, attention_window_size=8, bos_token_id=None, eos_token_id=1, pad_token_id=0,
            )  # fmt: skip
        case "qwen3next":
            return tr.Qwen3NextConfig(
                **common, layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
                linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8, num_experts=2,
                num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=16,
            )  # fmt: skip
        case "gptoss":
            return tr.GptOssConfig(**common, num_local_experts=2, num_experts_per_tok=1, sliding_window=8)
        case "dynamic":
            rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
            return tr.LlamaConfig(**common, rope_parameters=rope)
        case "bloom":
            return tr.BloomConfig(
                vocab_size=vocab, hidden_size=16, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=1
            )
        case "lfm2":
            return tr.Lfm2Config(
                **{k: v for k, v in common.items() if k != "head_dim"}, layer_types=["conv", "full_attention"]
            )
        case "falconh1":
            return tr.FalconH1Config(
                **common,
                mamba_d_ssm=16,
                mamba_n_heads=2,
                mamba_d_head=8,
                mamba_n_groups=1,
                mamba_d_state=4,
                mamba_chunk_size=4,
            )
    raise KeyError(family)


SUPPORTED = [
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma3",
    "gemma2",
    "phi3",
    "longrope",
    "yarn",
    "gpt2",
    "olmo2",
    "mixtral",
]
REFUSED = ["t5", "mamba", "recurrentgemma", "qwen3next", "gptoss", "dynamic", "bloom", "lfm2", "falconh1"]


def tiny(family: str, *, vocab: int = 16, seed: int = 0, dtype: torch.dtype = torch.float32, spread: float = 0.3):
    """A random model of a family with ``vocab`` ids, EOS id 1; weights of standard deviation ``spread``.

    The spread is large on purpose, so that attention matters and next-token laws are far from uniform.
    """
    config = _config(family, vocab)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        kind = tr.AutoModelForSeq2SeqLM if config.is_encoder_decoder else tr.AutoModelForCausalLM
        model = kind.from_config(config)
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 or "bias" in name:
                parameter.data.normal_(0, spread)
            elif "norm" in name or "ln_" in name:
                parameter.data.uniform_(0.5, 1.5)
    model.generation_config.eos_token_id = 1
    return model.to(dtype).eval()
