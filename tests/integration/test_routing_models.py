"""Routing on the models it is for: transformers' own classes, built tiny from their configs, and PEFT's wrappers.

In every model each matrix is expected to be an ordinary Linear weight, [out, in], but for those listed here.
"""

import re

import peft
import pytest
import torch
import transformers as hf
from torch import nn

from pumice.optim import param_groups, routing

# Sizes that tell apart: 64 tokens, width 16, inner width 24, 4 experts of width 20, shared ones of width 28.
BASE = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
GQA = BASE | {"num_key_value_heads": 1}
MOE = GQA | {"num_experts_per_tok": 2}
BERT = BASE | {"max_position_embeddings": 12}
T5 = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
GPT2 = {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 12}

MODELS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GQA)),
    "llama, tied": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GQA, tie_word_embeddings=True)),
    "llama, classifier": lambda: hf.LlamaForSequenceClassification(hf.LlamaConfig(**GQA, num_labels=3)),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)),
    "gpt2, untied": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2, tie_word_embeddings=False)),
    "gpt-neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**BASE)),
    "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5)),
    "bert, masked": lambda: hf.BertForMaskedLM(hf.BertConfig(**BERT)),
    "bert, questions": lambda: hf.BertForQuestionAnswering(hf.BertConfig(**BERT)),
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**MOE, num_local_experts=4)),
    "qwen2-moe": lambda: hf.Qwen2MoeForCausalLM(
        hf.Qwen2MoeConfig(**MOE, num_experts=4, moe_intermediate_size=20, shared_expert_intermediate_size=28)
    ),
    "qwen3-moe": lambda: hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(**MOE, head_dim=8, num_experts=4, moe_intermediate_size=20)
    ),
    "deepseek-v3": lambda: hf.DeepseekV3ForCausalLM(
        hf.DeepseekV3Config(
            **MOE | {"num_key_value_heads": 2},
            moe_intermediate_size=20,
            n_routed_experts=4,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            q_lora_rank=6,
            kv_lora_rank=5,
            qk_rope_head_dim=4,
            qk_nope_head_dim=4,
            v_head_dim=8,
        )
    ),
    "gpt-oss": lambda: hf.GptOssForCausalLM(hf.GptOssConfig(**MOE, head_dim=8, num_local_experts=4)),
    "llama4": lambda: hf.Llama4ForCausalLM(
        hf.Llama4TextConfig(
            **GQA, head_dim=8, intermediate_size_mlp=28, num_local_experts=4, interleave_moe_layer_step=1
        )
    ),
    "jetmoe": lambda: hf.JetMoeForCausalLM(hf.JetMoeConfig(**GQA, kv_channels=8, num_local_experts=4)),
    "switch": lambda: hf.SwitchTransformersForConditionalGeneration(
        hf.SwitchTransformersConfig(
            **T5 | {"num_layers": 2},
            num_decoder_layers=2,
            num_experts=4,
            num_sparse_encoder_layers=1,
            num_sparse_decoder_layers=1,
        )
    ),
    "mamba": lambda: hf.MambaForCausalLM(
        hf.MambaConfig(vocab_size=64, hidden_size=16, state_size=4, num_hidden_layers=2, time_step_rank=3)
    ),
    "mamba2": lambda: hf.Mamba2ForCausalLM(
        hf.Mamba2Config(
            vocab_size=64, hidden_size=16, state_size=4, num_hidden_layers=2, num_heads=4, head_dim=8, n_groups=1
        )
    ),
    "rwkv": lambda: hf.RwkvForCausalLM(
        hf.RwkvConfig(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, context_length=8)
    ),
    "recurrent-gemma": lambda: hf.RecurrentGemmaForCausalLM(
        hf.RecurrentGemmaConfig(**GQA | {"num_hidden_layers": 3}, lru_width=16)
    ),
    "vit": lambda: hf.ViTForImageClassification(
        hf.ViTConfig(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=8,
            patch_size=4,
            num_labels=5,
        )
    ),
}

EMBEDDING, ROUTER, BIAS = "adamw: embedding", "adamw: router of experts", "adamw, no decay: bias stored as a matrix"
CONV1D = {
    "transformer.wpe.weight": EMBEDDING,
    "transformer.h.*.attn.c_attn.weight": "[in, out] 16",
    "transformer.h.*.attn.c_proj.weight": "[in, out] 16",
    "transformer.h.*.mlp.c_fc.weight": "[in, out] 16",
    "transformer.h.*.mlp.c_proj.weight": "[in, out] 64",
}
OUTSIDE = {  # name without layer numbers -> what it is, for whatever is not an ordinary Linear weight
    "llama": {"model.embed_tokens.weight": EMBEDDING, "lm_head.weight": "adamw: output head of LlamaForCausalLM"},
    "llama, tied": {"model.embed_tokens.weight": f"{EMBEDDING}, shared with lm_head.weight"},
    "llama, classifier": {
        "model.embed_tokens.weight": EMBEDDING,
        "score.weight": "adamw: output head, one row per label",
    },
    "gpt2": CONV1D | {"transformer.wte.weight": f"{EMBEDDING}, shared with lm_head.weight"},
    "gpt2, untied": CONV1D
    | {"transformer.wte.weight": EMBEDDING, "lm_head.weight": "adamw: output head of GPT2LMHeadModel"},
    "gpt-neox": {
        "gpt_neox.embed_in.weight": EMBEDDING,
        "lm_head.weight": "adamw: output head of GPTNeoXForCausalLM",
    },
    "t5": {
        "shared.weight": f"{EMBEDDING}, shared with encoder.embed_tokens.weight, decoder.embed_tokens.weight, "
        "lm_head.weight",
        "encoder.block.*.layer.*.SelfAttention.relative_attention_bias.weight": EMBEDDING,
        "decoder.block.*.layer.*.SelfAttention.relative_attention_bias.weight": EMBEDDING,
    },
    "bert, masked": {
        "bert.embeddings.word_embeddings.weight": f"{EMBEDDING}, shared with cls.predictions.decoder.weight",
        "bert.embeddings.position_embeddings.weight": EMBEDDING,
        "bert.embeddings.token_type_embeddings.weight": EMBEDDING,
    },
    "bert, questions": {
        "bert.embeddings.word_embeddings.weight": EMBEDDING,
        "bert.embeddings.position_embeddings.weight": EMBEDDING,
        "bert.embeddings.token_type_embeddings.weight": EMBEDDING,
        "qa_outputs.weight": "adamw: output head, one row per label",
    },
    "mixtral": {
        "model.embed_tokens.weight": EMBEDDING,
        "model.layers.*.mlp.gate.weight": ROUTER,
        "model.layers.*.mlp.experts.gate_up_proj": "[E, out, in] 16",
        "model.layers.*.mlp.experts.down_proj": "[E, out, in] 24",
        "lm_head.weight": "adamw: output head of MixtralForCausalLM",
    },
    "qwen2-moe": {
        "model.embed_tokens.weight": EMBEDDING,
        "model.layers.*.mlp.gate.weight": ROUTER,
        "model.layers.*.mlp.experts.gate_up_proj": "[E, out, in] 16",
        "model.layers.*.mlp.experts.down_proj": "[E, out, in] 20",
        "model.layers.*.mlp.shared_expert_gate.weight": "adamw: one row",
        "lm_head.weight": "adamw: output head of Qwen2MoeForCausalLM",
    },
    "qwen3-moe": {
        "model.embed_tokens.weight": EMBEDDING,
        "model.layers.*.mlp.gate.weight": ROUTER,
        "model.layers.*.mlp.experts.gate_up_proj": "[E, out, in] 16",
        "model.layers.*.mlp.experts.down_proj": "[E, out, in] 20",
        "lm_head.weight": "adamw: output head of Qwen3MoeForCausalLM",
    },
    "deepseek-v3": {
        "model.embed_tokens.weight": EMBEDDING,
        "model.layers.*.mlp.gate.weight": ROUTER,
        "model.layers.*.mlp.experts.gate_up_proj": "[E, out, in] 16",
        "model.layers.*.mlp.experts.down_proj": "[E, out, in] 20",
        "lm_head.weight": "adamw: output head of DeepseekV3ForCausalLM",
    },
    "gpt-oss": {
        "model.embed_tokens.weight": EMBEDDING,
        "model.layers.*.mlp.router.weight": ROUTER,
        "model.layers.*.mlp.experts.gate_up_proj": "[E, in, out] 16",
        "model.layers.*.mlp.experts.gate_up_proj_bias": BIAS,
        "model.layers.*.mlp.experts.down_proj": "[E, in, out] 24",
        "model.layers.*.mlp.experts.down_proj_bias": BIAS,
        "lm_head.weight": "adamw: output head of GptOssForCausalLM",
    },
    "llama4": {
        "model.embed_tokens.weight": EMBEDDING,
        "model.layers.*.feed_forward.router.weight": ROUTER,
        "model.layers.*.feed_forward.experts.gate_up_proj": "[E, in, out] 16",
        "model.layers.*.feed_forward.experts.down_proj": "[E, in, out] 24",
        "lm_head.weight": "adamw: output head of Llama4ForCausalLM",
    },
    "jetmoe": {
        "model.embed_tokens.weight": f"{EMBEDDING}, shared with lm_head.weight",
        "model.layers.*.mlp.router.layer.weight": ROUTER,
        "model.layers.*.mlp.input_linear.weight": "[E, out, in] 16",
        "model.layers.*.mlp.output_linear.weight": "[E, out, in] 24",
        "model.layers.*.self_attention.experts.router.layer.weight": ROUTER,
        "model.layers.*.self_attention.experts.input_linear.weight": "[E, out, in] 16",
        "model.layers.*.self_attention.experts.output_linear.weight": "[E, out, in] 8",
    },
    "switch": {
        "shared.weight": f"{EMBEDDING}, shared with encoder.embed_tokens.weight, decoder.embed_tokens.weight, "
        "lm_head.weight",
        "encoder.block.*.layer.*.SelfAttention.relative_attention_bias.weight": EMBEDDING,
        "decoder.block.*.layer.*.SelfAttention.relative_attention_bias.weight": EMBEDDING,
        "encoder.block.*.layer.*.mlp.router.classifier.weight": ROUTER,
        "decoder.block.*.layer.*.mlp.router.classifier.weight": ROUTER,
    },
    "mamba": {
        "backbone.embeddings.weight": f"{EMBEDDING}, shared with lm_head.weight",
        "backbone.layers.*.mixer.A_log": "adamw: bare parameter of MambaMixer: input axis unknown",
        "backbone.layers.*.mixer.conv1d.weight": "adamw: convolution kernel",
    },
    "mamba2": {
        "backbone.embeddings.weight": EMBEDDING,
        "backbone.layers.*.mixer.conv1d.weight": "adamw: convolution kernel",
        "lm_head.weight": "adamw: output head of Mamba2ForCausalLM",
    },
    "rwkv": {
        "rwkv.embeddings.weight": EMBEDDING,
        "rwkv.blocks.*.attention.time_mix_key": "adamw: one row",
        "rwkv.blocks.*.attention.time_mix_value": "adamw: one row",
        "rwkv.blocks.*.attention.time_mix_receptance": "adamw: one row",
        "rwkv.blocks.*.feed_forward.time_mix_key": "adamw: one row",
        "rwkv.blocks.*.feed_forward.time_mix_receptance": "adamw: one row",
        "head.weight": "adamw: output head of RwkvForCausalLM",
    },
    "recurrent-gemma": {
        "model.embed_tokens.weight": f"{EMBEDDING}, shared with lm_head.weight",
        "model.layers.*.temporal_block.conv_1d.weight": "adamw: convolution kernel",
        "model.layers.*.temporal_block.rg_lru.input_gate_weight": "adamw: bare parameter of RecurrentGemmaRglru: "
        "input axis unknown",
        "model.layers.*.temporal_block.rg_lru.recurrent_gate_weight": "adamw: bare parameter of RecurrentGemmaRglru: "
        "input axis unknown",
        "model.layers.*.temporal_block.rg_lru.input_gate_bias": BIAS,
        "model.layers.*.temporal_block.rg_lru.recurrent_gate_bias": BIAS,
    },
    "vit": {
        "vit.embeddings.cls_token": "adamw: one row",
        "vit.embeddings.position_embeddings": "adamw: bare parameter of ViTEmbeddings: input axis unknown",
        "vit.embeddings.patch_embeddings.projection.weight": "adamw: input embedding of ViTForImageClassification",
        "classifier.weight": "adamw: output head, one row per label",
    },
}


def described(row):
    if row.rule == "sinkgd":
        experts = "E, " if len(row.shape) == 3 else ""
        return f"[{experts}{'in, out' if row.transposed else 'out, in'}] {row.input_dim}"
    return f"{row.rule}{'' if row.decays else ', no decay'}: {row.reason}"


def is_linear(model, row):
    path, _, attribute = row.name.rpartition(".")
    module = model.get_submodule(path)
    return (
        attribute == "weight" and isinstance(module, nn.Linear) and described(row) == f"[out, in] {module.in_features}"
    )


@pytest.mark.parametrize("name", MODELS)
def test_every_matrix_is_routed_by_what_it_is(name):
    model = MODELS[name]()
    table = routing(model)

    special = {
        re.sub(r"\.\d+(?=\.|$)", ".*", row.name): described(row)
        for row in table
        if len(row.shape) > 1 and not is_linear(model, row)
    }
    assert special == OUTSIDE[name]
    assert not any(row.decays for row in table if len(row.shape) < 2)
    grouped = [id(parameter) for group in param_groups(model) for _, parameter in group["params"]]
    assert sorted(grouped) == sorted(map(id, model.parameters()))


@pytest.mark.parametrize("name", ["gpt2", "mixtral", "qwen3-moe", "gpt-oss", "llama4", "jetmoe"])
def test_the_input_axis_is_the_one_the_forward_contracts(name):
    """A feature that is zero at the input of a module gets no gradient in the matrix that reads it."""
    model = MODELS[name]()
    first = {
        "gpt2": "transformer.h.0.mlp.c_fc.weight",
        "llama4": "model.layers.0.feed_forward.experts.gate_up_proj",
        "jetmoe": "model.layers.0.mlp.input_linear.weight",
    }.get(name, "model.layers.0.mlp.experts.gate_up_proj")
    row = routing(model)[first]
    axis, other = (-2, -1) if row.transposed else (-1, -2)

    def silence(_, inputs):
        hidden, *rest = inputs
        return (hidden.index_fill(-1, torch.tensor([3]), 0.0), *rest)

    handle = model.get_submodule(first.rpartition(".")[0]).register_forward_pre_hook(silence)
    parameter = model.get_parameter(first)
    with torch.no_grad():
        for weight in model.parameters():  # some are built as zeros
            weight.normal_(0, 0.1)
    logits = model(torch.arange(32).view(4, 8) % 64).logits
    (gradient,) = torch.autograd.grad(logits.square().mean(), parameter)
    handle.remove()
    assert gradient.select(axis, 3).abs().max() == 0
    assert gradient.select(axis, 4).abs().max() > 0
    assert gradient.select(other, 3).abs().max() > 0


def test_routing_works_before_weights_exist():
    with torch.device("meta"):
        meta = MODELS["gpt-oss"]()
    assert routing(meta) == routing(MODELS["gpt-oss"]())


def test_a_compiled_transformers_model_is_routed_alike():
    model = MODELS["llama"]()
    plain, wrapped = routing(model), routing(torch.compile(model))
    assert [(f"_orig_mod.{row.name}", row.reason) for row in plain] == [(row.name, row.reason) for row in wrapped]


# --- PEFT --------------------------------------------------------------------------------------------------------


def trained(model):
    """Trainable parameters by the end of their names."""
    return {
        row.name.removeprefix("base_model.model."): described(row) for row in routing(model) if row.rule != "frozen"
    }


def test_lora_is_balanced_under_any_adapter_name_but_for_embeddings_head_and_rank_one():
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "embed_tokens", "lm_head"])
    model = peft.get_peft_model(MODELS["llama"](), config, adapter_name="mine")
    attention = {
        f"model.layers.{i}.self_attn.q_proj.lora_{matrix}.mine.weight": f"[out, in] {size}"
        for i in range(2)
        for matrix, size in (("A", 16), ("B", 2))
    }
    assert trained(model) == attention | {
        "model.embed_tokens.lora_embedding_A.mine": "adamw: input embedding of LlamaForCausalLM",
        "model.embed_tokens.lora_embedding_B.mine": "adamw: input embedding of LlamaForCausalLM",
        "lm_head.lora_A.mine.weight": "adamw: output head of LlamaForCausalLM",
        "lm_head.lora_B.mine.weight": "adamw: output head of LlamaForCausalLM",
    }

    model.add_adapter("slim", peft.LoraConfig(r=1, target_modules=["v_proj"]))
    model.set_adapter("slim")
    assert trained(model) == {
        f"model.layers.{i}.self_attn.v_proj.lora_{matrix}.slim.weight": f"adamw: one {what}"
        for i in range(2)
        for matrix, what in (("A", "row"), ("B", "column"))
    }


def test_modules_to_save_follow_their_originals():
    config = peft.LoraConfig(
        r=2,
        target_modules=["q_proj"],
        layers_to_transform=[0],
        modules_to_save=["embed_tokens", "score"],
        use_dora=True,
    )
    model = peft.get_peft_model(MODELS["llama, classifier"](), config, adapter_name="mine")
    assert trained(model) == {
        "model.embed_tokens.modules_to_save.mine.weight": "adamw: embedding",
        "model.layers.0.self_attn.q_proj.lora_A.mine.weight": "[out, in] 16",
        "model.layers.0.self_attn.q_proj.lora_B.mine.weight": "[out, in] 2",
        "model.layers.0.self_attn.q_proj.lora_magnitude_vector.mine.weight": (
            "adamw, no decay: fewer than two dimensions"
        ),
        "score.modules_to_save.mine.weight": "adamw: output head, one row per label",
    }


def test_saved_language_model_head_and_conv1d_follow_their_originals():
    config = peft.LoraConfig(
        r=2, target_modules=["c_attn"], layers_to_transform=[0], fan_in_fan_out=True, modules_to_save=["c_fc", "wpe"]
    )
    assert trained(peft.get_peft_model(MODELS["gpt2"](), config)) == {
        "transformer.wpe.modules_to_save.default.weight": "adamw: embedding",
        "transformer.h.0.attn.c_attn.lora_A.default.weight": "[out, in] 16",
        "transformer.h.0.attn.c_attn.lora_B.default.weight": "[out, in] 2",
        **{
            f"transformer.h.{i}.mlp.c_fc.modules_to_save.default.{name}": what
            for i in range(2)
            for name, what in (
                ("weight", "[in, out] 16"),
                ("bias", "adamw, no decay: fewer than two dimensions"),
            )
        },
    }
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], layers_to_transform=[0], modules_to_save=["lm_head"])
    head = trained(peft.get_peft_model(MODELS["llama"](), config))["lm_head.modules_to_save.default.weight"]
    assert head == "adamw: output head of LlamaForCausalLM"


def test_lora_on_fused_experts_is_balanced_and_a_saved_router_is_not():
    config = peft.LoraConfig(
        r=2,
        target_modules=[],
        target_parameters=["layers.0.mlp.experts.gate_up_proj", "layers.0.mlp.experts.down_proj"],
        modules_to_save=["gate"],
    )
    assert trained(peft.get_peft_model(MODELS["mixtral"](), config)) == {
        "model.layers.0.mlp.experts.base_layer.lora_A.default.weight": "[out, in] 16",
        "model.layers.0.mlp.experts.base_layer.lora_B.default.weight": "[out, in] 8",
        "model.layers.0.mlp.experts.lora_A.default.weight": "[out, in] 24",
        "model.layers.0.mlp.experts.lora_B.default.weight": "[out, in] 8",
        "model.layers.0.mlp.gate.modules_to_save.default.weight": "adamw: router of experts",
        "model.layers.1.mlp.gate.modules_to_save.default.weight": "adamw: router of experts",
    }
