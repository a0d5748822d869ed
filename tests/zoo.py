"""Architectures nobody here wrote: tiny, randomly initialized models of `transformers`, each with its batches.

A builder imports only what it needs, so that collecting the tests costs nothing. Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

LABELS, VOCABULARY, LENGTH = 3, 10, 5
BERT_LIKE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 16, "max_position_embeddings": 16, "pad_token_id": 0, "num_labels": LABELS,
}  # fmt: skip
LLAMA_LIKE: dict[str, Any] = {
    **BERT_LIKE, "num_key_value_heads": 1, "head_dim": 4, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
VIT_LIKE: dict[str, Any] = {
    "image_size": 16, "patch_size": 8, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 16, "num_labels": LABELS,
}  # fmt: skip
SPEECH_LIKE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 16, "conv_dim": (4, 4), "conv_kernel": (4, 3), "conv_stride": (3, 2),
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 6,
    "num_labels": LABELS,
}  # fmt: skip

Batch = Any


@dataclass(frozen=True)
class Architecture:
    """`build()` makes the model, `batch(n, generator)` a batch of n examples."""

    build: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], Batch]


def labels(n: int, generator: torch.Generator) -> Tensor:
    return torch.randint(LABELS, (n,), generator=generator)


def tokens(n: int, generator: torch.Generator, mask: bool = True) -> Batch:
    """Sequences of different lengths that end with token 2, padded on the right with token 0."""
    ids = torch.randint(3, VOCABULARY, (n, LENGTH), generator=generator)
    lengths = (torch.arange(n) % 3 + LENGTH - 2).unsqueeze(1)
    inside = torch.arange(LENGTH) < lengths
    ids = ids.scatter(1, lengths - 1, 2) * inside
    found = {"input_ids": ids, "attention_mask": inside.long()} if mask else {"input_ids": ids}
    return {**found, "labels": labels(n, generator)}


def next_tokens(n: int, generator: torch.Generator) -> Batch:
    """Language modeling: a target at every position, none at the padding."""
    batch = tokens(n, generator)
    targets = batch["input_ids"].roll(-1, 1)
    return {**batch, "labels": targets.masked_fill(targets == 0, -100)}


def tagged_tokens(n: int, generator: torch.Generator) -> Batch:
    batch = tokens(n, generator)
    tags = torch.randint(LABELS, (n, LENGTH), generator=generator)
    return {**batch, "labels": tags.masked_fill(batch["attention_mask"] == 0, -100)}


def floats(n: int, generator: torch.Generator, name: str, *shape: int) -> Batch:
    return {name: torch.randn(n, *shape, generator=generator), "labels": labels(n, generator)}


def images(size: int) -> Callable[[int, torch.Generator], Batch]:
    return lambda n, generator: floats(n, generator, "pixel_values", 3, size, size)


def pixels(n: int, generator: torch.Generator) -> Batch:
    """A class for each of 4 × 4 pixels; likelihoods read classes last."""
    batch = floats(n, generator, "pixel_values", 3, 16, 16)
    return {**batch, "labels": torch.randint(LABELS, (n, 4, 4), generator=generator)}


def sound(n: int, generator: torch.Generator) -> Batch:
    return floats(n, generator, "input_values", 50)


def model(name: str, head: str, options: dict[str, Any]) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{name}Config")(**options)
    return getattr(transformers, f"{name}{head}")(config)  # type: ignore[no-any-return]


class ClassesLast(nn.Module):
    """Logits `[N, C, H, W]` as `[N, H, W, C]`."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, **inputs: Any) -> Tensor:
        logits: Tensor = self.network(**inputs).logits
        return logits.movedim(1, -1)


class Headed(nn.Module):
    """A backbone without a classifier of its own, its last hidden states averaged under a linear head."""

    def __init__(self, backbone: nn.Module, width: int) -> None:
        super().__init__()
        self.backbone, self.head = backbone, nn.Linear(width, LABELS)

    def forward(self, **inputs: Any) -> Tensor:
        hidden: Tensor = self.backbone(**inputs)[0]
        return self.head(hidden.flatten(2).mean(2) if hidden.dim() == 4 else hidden.mean(1))


def headed(name: str, head: str, options: dict[str, Any], width: int = 8) -> nn.Module:
    return Headed(model(name, head, options), width)


def text(name: str, head: str = "ForSequenceClassification", base: Any = BERT_LIKE, **options: Any) -> Architecture:
    batch = next_tokens if head.endswith(("LM", "LMHeadModel")) else tokens
    return Architecture(partial(model, name, head, base | options), batch)


def image(name: str, size: int = 16, base: Any = VIT_LIKE, **options: Any) -> Architecture:
    return Architecture(partial(model, name, "ForImageClassification", base | options), images(size))


def speech(name: str, **options: Any) -> Architecture:
    return Architecture(partial(model, name, "ForSequenceClassification", SPEECH_LIKE | options), sound)


_L = {"num_labels": LABELS}
_GPT = {"vocab_size": VOCABULARY, "pad_token_id": 0, "num_labels": LABELS, "bos_token_id": 1, "eos_token_id": 2}
_GPT2 = {**_GPT, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}
_BART = {
    **_GPT, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 16,
    "decoder_start_token_id": 1, "forced_eos_token_id": None,
}  # fmt: skip
_T5 = {**_GPT, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
_STAGES = {"depths": [1, 1], "num_labels": LABELS}
_MOE: dict[str, Any] = {"num_local_experts": 3, "num_experts_per_tok": 2}
_VIDEO = {"image_size": 8, "patch_size": 4, "num_frames": 2}

# fmt: off
TRANSFORMERS: dict[str, Architecture] = {
    # encoders
    "bert": text("Bert"),
    "roberta": text("Roberta", max_position_embeddings=20),
    "distilbert": text("DistilBert", base=_GPT, dim=8, n_layers=2, n_heads=2, hidden_dim=16, max_position_embeddings=16),
    "albert": text("Albert", embedding_size=4),
    "electra": text("Electra", embedding_size=4),
    "deberta": text("Deberta", relative_attention=True, pos_att_type=["c2p", "p2c"], max_relative_positions=4),
    "deberta-v2": text("DebertaV2", relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=4),
    "mpnet": text("MPNet", max_position_embeddings=20),
    "xlnet": text("XLNet", base=_GPT, d_model=8, n_layer=2, n_head=2, d_inner=16),
    "xlm": text("XLM", base=_GPT, emb_dim=8, n_layers=1, n_heads=2, max_position_embeddings=16),
    "fnet": Architecture(partial(model, "FNet", "ForSequenceClassification", BERT_LIKE), partial(tokens, mask=False)),
    "funnel": text("Funnel", base=_GPT, block_sizes=[1, 1], num_decoder_layers=1, d_model=8, n_head=2, d_head=4, d_inner=16),
    "longformer": text("Longformer", attention_window=4, max_position_embeddings=20),
    "big-bird": text("BigBird", attention_type="original_full"),
    "convbert": text("ConvBert", embedding_size=8, conv_kernel_size=3, head_ratio=2),
    "squeezebert": text("SqueezeBert", embedding_size=8, q_groups=2, k_groups=2, v_groups=2, post_attention_groups=1, intermediate_groups=2, output_groups=2),
    "mobilebert": text("MobileBert", embedding_size=4, intra_bottleneck_size=8, hidden_size=16, true_hidden_size=8, num_feedforward_networks=2),
    "ibert": text("IBert"),
    "nystromformer": text("Nystromformer", num_landmarks=5, segment_means_seq_len=5, max_position_embeddings=20),
    "canine": text("Canine", downsampling_rate=2, num_hash_functions=2, num_hash_buckets=10, local_transformer_stride=4, max_position_embeddings=32),
    "perceiver": text("Perceiver", base=_GPT, num_latents=3, d_latents=8, d_model=8, num_blocks=1, num_self_attends_per_block=1, num_self_attention_heads=2, num_cross_attention_heads=2, max_position_embeddings=16),
    "modernbert": text("ModernBert", cls_token_id=1, sep_token_id=2, bos_token_id=1, eos_token_id=2),
    "esm": text("Esm", position_embedding_type="rotary", mask_token_id=1),
    "rembert": text("RemBert", input_embedding_size=4, output_embedding_size=4),
    "luke": text("Luke", entity_vocab_size=5, entity_emb_size=4),
    "xmod": text("Xmod", languages=["en"], default_language="en", max_position_embeddings=20),
    # decoders
    "gpt2": text("GPT2", base=_GPT2),
    "openai-gpt": text("OpenAIGPT", base=_GPT2),
    "gpt-neo": text("GPTNeo", base=_GPT, hidden_size=8, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]], window_size=2, max_position_embeddings=16),
    "gpt-neox": text("GPTNeoX"),
    "gptj": text("GPTJ", base=_GPT2, rotary_dim=2),
    "gpt-bigcode": text("GPTBigCode", base=_GPT2),
    "opt": text("OPT", ffn_dim=16, word_embed_proj_dim=4),
    "bloom": text("Bloom", base=_GPT, hidden_size=8, n_layer=2, n_head=2),
    "mpt": text("Mpt", base=_GPT, d_model=8, n_layers=1, n_heads=2, expansion_ratio=2, max_seq_len=16),
    "ctrl": text("CTRL", base=_GPT2, dff=16),
    "biogpt": text("BioGpt"),
    "llama": text("Llama", base=LLAMA_LIKE),
    "mistral": text("Mistral", base=LLAMA_LIKE, sliding_window=3),
    "qwen2": text("Qwen2", base=LLAMA_LIKE),
    "qwen3": text("Qwen3", base=LLAMA_LIKE),
    "gemma": text("Gemma", base=LLAMA_LIKE),
    "gemma2": text("Gemma2", base=LLAMA_LIKE, sliding_window=3),
    "phi": text("Phi", base=LLAMA_LIKE),
    "falcon": text("Falcon", multi_query=True),
    "stablelm": text("StableLm", base=LLAMA_LIKE),
    "persimmon": text("Persimmon", base=LLAMA_LIKE),
    "starcoder2": text("Starcoder2", base=LLAMA_LIKE),
    "diffllama": text("DiffLlama", base=LLAMA_LIKE, num_key_value_heads=2),
    # mixtures of experts
    "mixtral": text("Mixtral", base=LLAMA_LIKE, **_MOE),
    "qwen2-moe": text("Qwen2Moe", base=LLAMA_LIKE, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=8, shared_expert_intermediate_size=8),
    "gpt-oss": text("GptOss", base=LLAMA_LIKE, **_MOE),
    "deepseek-v3": text("DeepseekV3", base=LLAMA_LIKE, num_key_value_heads=2, moe_intermediate_size=8, n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2, first_k_dense_replace=1, kv_lora_rank=4, q_lora_rank=4, head_dim=2, qk_rope_head_dim=2, qk_nope_head_dim=2, v_head_dim=4),
    # recurrences
    "mamba": Architecture(partial(headed, "Mamba", "Model", {**_GPT, "hidden_size": 8, "num_hidden_layers": 1, "state_size": 4, "time_step_rank": 2}), partial(tokens, mask=False)),
    "mamba2": Architecture(partial(headed, "Mamba2", "Model", {**_GPT, "hidden_size": 8, "num_hidden_layers": 1, "state_size": 4, "num_heads": 4, "head_dim": 4, "n_groups": 1, "chunk_size": 4}), partial(tokens, mask=False)),
    "rwkv": Architecture(partial(headed, "Rwkv", "Model", {**_GPT, "hidden_size": 8, "num_hidden_layers": 2, "attention_hidden_size": 8, "intermediate_size": 16, "use_cache": False}), partial(tokens, mask=False)),
    "recurrent-gemma": text("RecurrentGemma", "ForCausalLM", base=LLAMA_LIKE, lru_width=8, attention_window_size=4, block_types=["recurrent", "attention"]),
    "jamba": text("Jamba", base=LLAMA_LIKE, num_experts=2, num_experts_per_tok=1, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1, mamba_d_state=4, mamba_dt_rank=2),
    # encoder and decoder
    "bart": text("Bart", base=_BART),
    "t5": text("T5", base=_T5),
    "t5-encoder": Architecture(partial(headed, "T5", "EncoderModel", _T5), tokens),
    "umt5-gated-encoder": Architecture(partial(headed, "UMT5", "EncoderModel", {**_T5, "feed_forward_proj": "gated-gelu"}), tokens),
    "switch-encoder": Architecture(partial(headed, "SwitchTransformers", "EncoderModel", {**_T5, "num_experts": 2, "num_sparse_encoder_layers": 1, "expert_capacity": 8}), tokens),
    # an output at every position
    "bert-tokens": Architecture(partial(model, "Bert", "ForTokenClassification", BERT_LIKE), tagged_tokens),
    "gpt2-language": text("GPT2", "LMHeadModel", base={**_GPT2, "vocab_size": VOCABULARY}),
    "llama-language": text("Llama", "ForCausalLM", base={**LLAMA_LIKE, "tie_word_embeddings": True}),
    "bert-language": Architecture(partial(model, "Bert", "ForMaskedLM", BERT_LIKE), next_tokens),
    # images
    "vit": image("ViT"),
    "deit": image("DeiT"),
    "beit": image("Beit", use_relative_position_bias=True, layer_scale_init_value=0.1),
    "dinov2": image("Dinov2", mlp_ratio=2),
    "clip": image("CLIP", base={"vision_config": VIT_LIKE, "text_config": BERT_LIKE, "projection_dim": 8, **_L}),
    "siglip": image("Siglip", base={"vision_config": VIT_LIKE, "text_config": BERT_LIKE, **_L}),
    "swin": image("Swin", 32, base={**_STAGES, "image_size": 32, "patch_size": 4, "embed_dim": 8, "num_heads": [1, 2], "window_size": 2}),
    "swinv2": image("Swinv2", 32, base={**_STAGES, "image_size": 32, "patch_size": 4, "embed_dim": 8, "num_heads": [1, 2], "window_size": 2}),
    "convnext": image("ConvNext", 32, base={**_STAGES, "hidden_sizes": [4, 8], "num_stages": 2, "layer_scale_init_value": 0.1}),
    "convnextv2": image("ConvNextV2", 32, base={**_STAGES, "hidden_sizes": [4, 8], "num_stages": 2}),
    "resnet": image("ResNet", 32, base={**_STAGES, "embedding_size": 4, "hidden_sizes": [4, 8], "layer_type": "basic"}),
    "resnet-bottleneck": image("ResNet", 32, base={**_STAGES, "embedding_size": 4, "hidden_sizes": [8, 16], "layer_type": "bottleneck"}),
    "regnet": image("RegNet", 32, base={**_STAGES, "embedding_size": 4, "hidden_sizes": [4, 8], "groups_width": 2}),
    "bit": image("Bit", 32, base={**_STAGES, "embedding_size": 8, "hidden_sizes": [8, 16], "num_groups": 4}),
    "mobilenet-v1": image("MobileNetV1", 32, base=_L, depth_multiplier=0.05, min_depth=4),
    "mobilenet-v2": image("MobileNetV2", 32, base=_L, depth_multiplier=0.1, min_depth=4, depth_divisible_by=4, finegrained_output=False),
    "mobilevit": image("MobileViT", 32, base=_L, image_size=32, hidden_sizes=[8, 8, 8], neck_hidden_sizes=[4, 4, 4, 4, 4, 4, 8], num_attention_heads=2, expand_ratio=2.0),
    "mobilevit-v2": image("MobileViTV2", 64, base=_L, image_size=64, width_multiplier=0.0625, n_attn_blocks=[1, 1, 1], base_attn_unit_dims=[64, 64, 64]),
    "efficientnet": image("EfficientNet", 32, base=_L, image_size=32, width_coefficient=0.1, depth_coefficient=0.1, hidden_dim=128, depth_divisor=4),
    "poolformer": image("PoolFormer", 32, base=_L, num_encoder_blocks=2, depths=[1, 1], hidden_sizes=[4, 8], patch_sizes=[7, 3], strides=[4, 2], padding=[2, 1], mlp_ratio=2.0),
    "segformer": image("Segformer", 32, base=_L, num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[4, 8], patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2]),
    "pvt": image("Pvt", 32, base=_L, image_size=32, num_encoder_blocks=4, depths=[1, 1, 1, 1], hidden_sizes=[4, 4, 8, 8], sequence_reduction_ratios=[2, 2, 1, 1], num_attention_heads=[1, 1, 2, 2], mlp_ratios=[2, 2, 2, 2]),
    "pvt-v2": image("PvtV2", 32, base=_L, image_size=32, num_encoder_blocks=4, depths=[1, 1, 1, 1], hidden_sizes=[4, 4, 8, 8], sr_ratios=[2, 2, 1, 1], num_attention_heads=[1, 1, 2, 2], mlp_ratios=[2, 2, 2, 2]),
    "cvt": image("Cvt", 32, base=_L, patch_sizes=[7, 3], patch_stride=[4, 2], patch_padding=[2, 1], embed_dim=[4, 8], num_heads=[1, 2], depth=[1, 2], mlp_ratio=[2.0, 2.0], attention_drop_rate=[0.0, 0.0], drop_rate=[0.0, 0.0], drop_path_rate=[0.0, 0.0], qkv_bias=[True, True], cls_token=[False, True], qkv_projection_method=["dw_bn", "dw_bn"], kernel_qkv=[3, 3], padding_kv=[1, 1], stride_kv=[2, 2], padding_q=[1, 1], stride_q=[1, 1]),
    "levit": image("Levit", 32, base=_L, image_size=32, hidden_sizes=[8, 8, 8], num_attention_heads=[1, 1, 1], depths=[1, 1, 1], key_dim=[4, 4, 4], mlp_ratio=[1, 1, 1], attention_ratio=[1, 1, 1]),
    "focalnet": image("FocalNet", 32, base={**_STAGES, "image_size": 32, "patch_size": 4, "embed_dim": 4, "hidden_sizes": [4, 8], "focal_levels": [1, 1], "focal_windows": [3, 3]}),
    "swiftformer": image("SwiftFormer", 32, base=_L, image_size=32, depths=[1, 1, 1, 1], embed_dims=[4, 4, 8, 8], mlp_ratio=1),
    "hiera": image("Hiera", 32, base=_L, image_size=[32, 32], patch_size=[7, 7], patch_stride=[4, 4], patch_padding=[3, 3], embed_dim=4, mlp_ratio=2.0, depths=[1, 1], num_heads=[1, 2], masked_unit_size=[4, 4], masked_unit_attention=[True, False], query_stride=[2, 2], embed_dim_multiplier=2.0, num_query_pool=1),
    "vit-msn": image("ViTMSN"),
    "imagegpt": Architecture(partial(model, "ImageGPT", "ForImageClassification", _GPT2), partial(tokens, mask=False)),
    "segformer-pixels": Architecture(lambda: ClassesLast(model("Segformer", "ForSemanticSegmentation", {**_L, "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [4, 8], "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 8})), pixels),
    # sound, video and time series
    "wav2vec2": speech("Wav2Vec2"),
    "wav2vec2-stable": speech("Wav2Vec2", do_stable_layer_norm=True, feat_extract_norm="layer", conv_bias=True),
    "hubert": speech("Hubert"),
    "wavlm": speech("WavLM", num_buckets=8, max_bucket_distance=8),
    "unispeech": speech("UniSpeech"),
    "sew": speech("SEW", squeeze_factor=2),
    "data2vec-audio": speech("Data2VecAudio", num_conv_pos_embeddings=2, conv_pos_kernel_size=3),
    "wav2vec2-conformer": speech("Wav2Vec2Conformer", conv_depthwise_kernel_size=3, position_embeddings_type="relative"),
    "whisper-encoder": Architecture(partial(model, "Whisper", "ForAudioClassification", {**_BART, "num_mel_bins": 4, "max_source_positions": 10, "classifier_proj_size": 6}), lambda n, g: floats(n, g, "input_features", 4, 20)),
    "ast": Architecture(partial(model, "AST", "ForAudioClassification", {**VIT_LIKE, "max_length": 16, "num_mel_bins": 16, "frequency_stride": 8, "time_stride": 8}), lambda n, g: floats(n, g, "input_values", 16, 16)),
    "timesformer": Architecture(partial(model, "Timesformer", "ForVideoClassification", VIT_LIKE | _VIDEO), lambda n, g: floats(n, g, "pixel_values", 2, 3, 8, 8)),
    "videomae": Architecture(partial(model, "VideoMAE", "ForVideoClassification", VIT_LIKE | _VIDEO), lambda n, g: floats(n, g, "pixel_values", 2, 3, 8, 8)),
}
# fmt: on
