"""Configurations whose shapes are timed with random weights (`metrale_bench --synthetic`), where no small checkpoint is to be had.

The hybrids are their families' published shapes made narrower until about a billion parameters take part in a token; the ratios between
widths, head counts and kinds of layers are the originals'. `mixture` is a Qwen3 with experts, `dense` the same with one feed-forward of
the width that a token meets there, so that their rates can be compared. `attention-*` have hardly any weights beside their caches.
"""
import json


def qwen3(**more):
    return dict(model_type="qwen3", vocab_size=32000, hidden_size=1024, intermediate_size=6144, num_hidden_layers=12, num_attention_heads=16,
                num_key_value_heads=8, head_dim=128, hidden_act="silu", max_position_embeddings=40960, rms_norm_eps=1e-6, rope_theta=1e6,
                tie_word_embeddings=True, **more)


def attention(heads, kv_heads, head_dim, layers):
    return dict(model_type="llama", vocab_size=512, hidden_size=64, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=heads,
                num_key_value_heads=kv_heads, head_dim=head_dim, hidden_act="silu", max_position_embeddings=40960, rms_norm_eps=1e-6,
                rope_theta=1e6, tie_word_embeddings=True)


# Gated delta rule, three layers to one of attention.
DELTA = dict(linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=8, linear_num_value_heads=16)

CONFIGS = {
    "qwen3_next": dict(
        model_type="qwen3_next", vocab_size=32000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=24, num_attention_heads=8,
        num_key_value_heads=1, hidden_act="silu", max_position_embeddings=32768, rms_norm_eps=1e-6, rope_theta=1e7, tie_word_embeddings=False,
        head_dim=256, full_attention_interval=4, partial_rotary_factor=0.25, decoder_sparse_step=1, mlp_only_layers=[],
        moe_intermediate_size=256, shared_expert_intermediate_size=256, num_experts=32, num_experts_per_tok=8, norm_topk_prob=True, **DELTA),
    "qwen3_5": dict(
        architectures=["Qwen3_5ForConditionalGeneration"], model_type="qwen3_5", tie_word_embeddings=True,
        text_config=dict(
            model_type="qwen3_5_text", vocab_size=65536, hidden_size=1280, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=8,
            num_key_value_heads=2, head_dim=256, hidden_act="silu", max_position_embeddings=32768, rms_norm_eps=1e-6, attention_bias=False,
            attn_output_gate=True, full_attention_interval=4, layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 6,
            mamba_ssm_dtype="float32", tie_word_embeddings=True, eos_token_id=2,
            rope_parameters=dict(mrope_interleaved=True, mrope_section=[11, 11, 10], partial_rotary_factor=0.25, rope_theta=1e7,
                                 rope_type="default"), **DELTA)),
    "nemotron_h": dict(
        model_type="nemotron_h", vocab_size=65536, hidden_size=1536, intermediate_size=6144, num_hidden_layers=26, num_attention_heads=16,
        num_key_value_heads=4, max_position_embeddings=32768, tie_word_embeddings=False, hybrid_override_pattern="M-M-M*-M-M-M*-M-M-M*-M-M-M",
        head_dim=128, layer_norm_epsilon=1e-5, norm_eps=1e-5, mamba_num_heads=48, mamba_head_dim=64, n_groups=8, ssm_state_size=128,
        conv_kernel=4, expand=2, chunk_size=128, mamba_hidden_act="silu", mlp_hidden_act="relu2", use_conv_bias=True, use_bias=False,
        mamba_proj_bias=False, mlp_bias=False, attention_bias=False, residual_in_fp32=False, time_step_min=0.001, time_step_max=0.1,
        time_step_floor=0.0001),
    "kimi_linear": dict(
        model_type="kimi_linear", vocab_size=32000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=20, num_attention_heads=16,
        num_key_value_heads=16, hidden_act="silu", rms_norm_eps=1e-5, rope_theta=1e4, tie_word_embeddings=False, head_dim=72,
        first_k_dense_replace=1, kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        linear_attn_config=dict(full_attn_layers=[4, 8, 12, 16, 20], kda_layers=[i for i in range(1, 21) if i % 4], head_dim=128, num_heads=16,
                                short_conv_kernel_size=4),
        mla_use_nope=True, model_max_length=32768, moe_intermediate_size=256, moe_layer_freq=1, moe_renormalize=True,
        moe_router_activation_func="sigmoid", num_expert_group=1, num_experts=32, num_experts_per_token=8, num_shared_experts=1,
        num_nextn_predict_layers=0, rope_scaling=None, routed_scaling_factor=2.446, topk_group=1, use_grouped_topk=True),
    "mixture": qwen3() | dict(model_type="qwen3_moe", num_experts=32, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
                              decoder_sparse_step=1, mlp_only_layers=[]),
    "dense": qwen3(),
    "attention-64": attention(9, 3, 64, 8),
    "attention-128": attention(16, 8, 128, 2),
    "attention-256": attention(4, 1, 256, 8),
}


def folder(name, under):
    """The folder with the configuration, below `under`."""
    path = under / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIGS[name], indent=1) + "\n")
    return path
