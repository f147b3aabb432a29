"""Architectures of Hugging Face for the zoo, in configurations of some ten thousand
random weights."""

import torch
from torch.export import Dim

VOCABULARY = 64
LENGTH = 12
SMALL = dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
             max_position_embeddings=64)
GROUPED = dict(SMALL, num_key_value_heads=2)
TOKENS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
SEQ2SEQ = dict(vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
               decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64,
               decoder_start_token_id=1, **TOKENS)
IMAGE = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=16, patch_size=4)
SPEECH = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, conv_dim=(16, 16),
              conv_kernel=(8, 4), conv_stride=(4, 2), num_feat_extract_layers=2, num_conv_pos_embeddings=8,
              num_conv_pos_embedding_groups=2, layerdrop=0.0, apply_spec_augment=False, mask_time_prob=0.0,
              vocab_size=VOCABULARY)


def ids(batch=2, length=LENGTH):
    return torch.randint(3, VOCABULARY, (batch, length))


def decoder():
    """Token numbers with any batch and length."""
    return (ids(),), {}, ({0: Dim("batch", min=1, max=64), 1: Dim("length", min=2, max=32)},)


def decoder_static():
    return (ids(),), {}, None


def encoder():
    """Token numbers with padding."""
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[1, 8:] = 0
    return (), {"input_ids": ids(), "attention_mask": mask}, None


def encoder_decoder():
    return (), {"input_ids": ids(), "decoder_input_ids": ids(2, 8)}, None


def masked_encoder_decoder():
    return (), {"input_ids": ids(), "attention_mask": torch.ones(2, LENGTH, dtype=torch.int64),
                "decoder_input_ids": ids(2, 8), "decoder_attention_mask": torch.ones(2, 8, dtype=torch.int64)}, None


def image(size=16, channels=3):
    return lambda: ((torch.randn(2, channels, size, size),), {}, None)


def wave():
    return (torch.randn(2, 200),), {}, None


# name: (class of the model, class of the configuration, configuration, inputs)
DECODERS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED, decoder),
    "llama_tied": ("LlamaForCausalLM", "LlamaConfig", dict(GROUPED, tie_word_embeddings=True), decoder),
    "mistral": ("MistralForCausalLM", "MistralConfig", dict(GROUPED, sliding_window=8), decoder),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", GROUPED, decoder),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", dict(GROUPED, head_dim=8), decoder),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", dict(GROUPED, head_dim=8), decoder),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", dict(GROUPED, head_dim=8, sliding_window=8), decoder),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", dict(GROUPED, head_dim=8, sliding_window=8), decoder),
    "phi": ("PhiForCausalLM", "PhiConfig", dict(SMALL, resid_pdrop=0.1), decoder),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", dict(GROUPED, pad_token_id=0), decoder),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config",
             dict(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, **TOKENS), decoder),
    "gpt_neo": ("GPTNeoForCausalLM", "GPTNeoConfig",
                dict(vocab_size=VOCABULARY, hidden_size=32, num_layers=2, num_heads=4, max_position_embeddings=64,
                     attention_types=[[["global", "local"], 1]], window_size=8, **TOKENS), decoder),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", dict(SMALL, **TOKENS), decoder),
    "gptj": ("GPTJForCausalLM", "GPTJConfig",
             dict(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=8, **TOKENS), decoder),
    "codegen": ("CodeGenForCausalLM", "CodeGenConfig",
                dict(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=8, **TOKENS),
                decoder),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig",
                    dict(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, **TOKENS), decoder),
    "opt": ("OPTForCausalLM", "OPTConfig",
            dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=48,
                 max_position_embeddings=64, word_embed_proj_dim=32, **TOKENS), decoder),
    "bloom": ("BloomForCausalLM", "BloomConfig", dict(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, **TOKENS),
              decoder),
    "falcon": ("FalconForCausalLM", "FalconConfig", dict(SMALL, **TOKENS), decoder),
    "mpt": ("MptForCausalLM", "MptConfig",
            dict(vocab_size=VOCABULARY, d_model=32, n_layers=2, n_heads=4, max_seq_len=64, expansion_ratio=2), decoder),
    "starcoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", dict(GROUPED, **TOKENS), decoder),
    "stablelm": ("StableLmForCausalLM", "StableLmConfig", dict(GROUPED, **TOKENS), decoder),
    "olmo": ("OlmoForCausalLM", "OlmoConfig", dict(GROUPED, **TOKENS), decoder),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", dict(GROUPED, **TOKENS), decoder),
    "cohere": ("CohereForCausalLM", "CohereConfig", dict(GROUPED, **TOKENS), decoder),
    "granite": ("GraniteForCausalLM", "GraniteConfig", dict(GROUPED, **TOKENS), decoder),
    "glm": ("GlmForCausalLM", "GlmConfig", dict(GROUPED, head_dim=8, **TOKENS), decoder),
    "smollm3": ("SmolLM3ForCausalLM", "SmolLM3Config", dict(GROUPED, **TOKENS), decoder),
    "nemotron": ("NemotronForCausalLM", "NemotronConfig", dict(GROUPED, **TOKENS), decoder),
    "xglm": ("XGLMForCausalLM", "XGLMConfig",
             dict(vocab_size=VOCABULARY, d_model=32, num_layers=2, attention_heads=4, ffn_dim=48,
                  max_position_embeddings=64, **TOKENS), decoder_static),
}
EXPERTS = {
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", dict(GROUPED, num_local_experts=4), decoder),
    "qwen2_moe": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig",
                  dict(GROUPED, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
                       shared_expert_intermediate_size=16, **TOKENS), decoder),
    "olmoe": ("OlmoeForCausalLM", "OlmoeConfig", dict(GROUPED, num_experts=4, num_experts_per_tok=2, **TOKENS),
              decoder),
    "switch_transformers": ("SwitchTransformersForConditionalGeneration", "SwitchTransformersConfig",
                            dict(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_sparse_encoder_layers=1,
                                 num_decoder_layers=2, num_sparse_decoder_layers=1, num_heads=4, num_experts=4,
                                 decoder_start_token_id=0, router_jitter_noise=0.0, **TOKENS), masked_encoder_decoder),
}
STATE_SPACE = {
    "mamba": ("MambaForCausalLM", "MambaConfig",
              dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4, **TOKENS), decoder_static),
    "mamba2": ("Mamba2ForCausalLM", "Mamba2Config",
               dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=8, num_heads=8, head_dim=8,
                    n_groups=2, chunk_size=4, **TOKENS), decoder_static),
    "falcon_mamba": ("FalconMambaForCausalLM", "FalconMambaConfig",
                     dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4, **TOKENS),
                     decoder_static),
    "recurrent_gemma": ("RecurrentGemmaForCausalLM", "RecurrentGemmaConfig",
                        dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
                             num_key_value_heads=1, head_dim=8, intermediate_size=48, attention_window_size=16, lru_width=32,
                             **TOKENS), decoder_static),
    "rwkv": ("RwkvForCausalLM", "RwkvConfig",
             dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32,
                  intermediate_size=48, context_length=64, **TOKENS), decoder_static),
}
ENCODERS = {
    "bert": ("BertForMaskedLM", "BertConfig", SMALL, encoder),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", dict(SMALL, **TOKENS), encoder),
    "xlm_roberta": ("XLMRobertaForSequenceClassification", "XLMRobertaConfig", dict(SMALL, **TOKENS), encoder),
    "albert": ("AlbertForMaskedLM", "AlbertConfig",  # two blocks, each called twice
               dict(SMALL, embedding_size=16, num_hidden_layers=4, num_hidden_groups=2, **TOKENS), encoder),
    "electra": ("ElectraForPreTraining", "ElectraConfig", dict(SMALL, embedding_size=16), encoder),
    "distilbert": ("DistilBertForMaskedLM", "DistilBertConfig",
                   dict(vocab_size=VOCABULARY, dim=32, n_layers=2, n_heads=4, hidden_dim=48, max_position_embeddings=64),
                   encoder),
    "deberta_v2": ("DebertaV2ForMaskedLM", "DebertaV2Config",
                   dict(SMALL, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8), encoder),
    "mpnet": ("MPNetForMaskedLM", "MPNetConfig", dict(SMALL, **TOKENS), encoder),
    "modernbert": ("ModernBertForMaskedLM", "ModernBertConfig", dict(SMALL, local_attention=8, cls_token_id=1, sep_token_id=2,
                                                                     **TOKENS), encoder),
    "convbert": ("ConvBertForMaskedLM", "ConvBertConfig", dict(SMALL, embedding_size=16, head_ratio=2), encoder),
    "fnet": ("FNetForMaskedLM", "FNetConfig",
             dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, intermediate_size=48,
                  max_position_embeddings=64), decoder_static),
    "esm": ("EsmForMaskedLM", "EsmConfig", dict(SMALL, mask_token_id=3, position_embedding_type="rotary", **TOKENS), encoder),
    "reformer": ("ReformerModelWithLMHead", "ReformerConfig",
                 dict(vocab_size=VOCABULARY, hidden_size=32, attention_head_size=8, num_attention_heads=4, feed_forward_size=48,
                      attn_layers=["local", "lsh"], axial_pos_embds=False, is_decoder=True, num_hashes=2,
                      local_attn_chunk_length=4, lsh_attn_chunk_length=4, num_buckets=2, max_position_embeddings=64),
                 decoder_static),
}
ENCODER_DECODERS = {
    "t5": ("T5ForConditionalGeneration", "T5Config",
           dict(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0,
                **TOKENS), encoder_decoder),
    "bart": ("BartForConditionalGeneration", "BartConfig", SEQ2SEQ, encoder_decoder),
    "pegasus": ("PegasusForConditionalGeneration", "PegasusConfig", SEQ2SEQ, encoder_decoder),
    "marian": ("MarianMTModel", "MarianConfig", SEQ2SEQ, encoder_decoder),
    "mbart": ("MBartForConditionalGeneration", "MBartConfig", SEQ2SEQ, encoder_decoder),
    "m2m_100": ("M2M100ForConditionalGeneration", "M2M100Config", dict(SEQ2SEQ, encoder_layerdrop=0.0, decoder_layerdrop=0.0),
                encoder_decoder),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig",
                dict(SEQ2SEQ, num_mel_bins=8, max_source_positions=10, max_target_positions=16, apply_spec_augment=False),
                lambda: ((torch.randn(2, 8, 20),), {"decoder_input_ids": ids(2, 6)}, None)),
}
VISION = {
    "vit": ("ViTForImageClassification", "ViTConfig", IMAGE, image()),
    "deit": ("DeiTForImageClassification", "DeiTConfig", IMAGE, image()),
    "beit": ("BeitForImageClassification", "BeitConfig", dict(IMAGE, drop_path_rate=0.0), image()),
    "dinov2": ("Dinov2ForImageClassification", "Dinov2Config", IMAGE, image()),
    "swin": ("SwinForImageClassification", "SwinConfig",
             dict(image_size=16, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4,
                  drop_path_rate=0.0), image()),
    "convnext": ("ConvNextForImageClassification", "ConvNextConfig",
                 dict(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, patch_size=2, image_size=16), image()),
    "resnet": ("ResNetForImageClassification", "ResNetConfig",
               dict(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"), image(32)),
    "regnet": ("RegNetForImageClassification", "RegNetConfig",
               dict(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], groups_width=8), image(32)),
    "mobilenet_v2": ("MobileNetV2ForImageClassification", "MobileNetV2Config", dict(depth_multiplier=0.25, image_size=32),
                     image(32)),
    "efficientnet": ("EfficientNetForImageClassification", "EfficientNetConfig",
                     dict(image_size=32, width_coefficient=0.25, depth_coefficient=0.25, hidden_dim=320,
                          drop_connect_rate=0.0), image(32)),
    "segformer": ("SegformerForSemanticSegmentation", "SegformerConfig",
                  dict(num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16],
                       patch_sizes=[3, 3], strides=[2, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2],
                       decoder_hidden_size=16, drop_path_rate=0.0, num_labels=4), image(32)),
    "poolformer": ("PoolFormerForImageClassification", "PoolFormerConfig",
                   dict(hidden_sizes=[8, 16], depths=[1, 1], num_encoder_blocks=2, patch_sizes=[3, 3], strides=[2, 2],
                        padding=[1, 1], drop_path_rate=0.0), image(32)),
    "mobilevit": ("MobileViTForImageClassification", "MobileViTConfig",
                  dict(image_size=32, hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 8, 16, 16, 16, 32],
                       num_attention_heads=2, mlp_ratio=1.0), image(32)),
}
OTHERS = {
    "wav2vec2": ("Wav2Vec2ForCTC", "Wav2Vec2Config", SPEECH, wave),
    "hubert": ("HubertForCTC", "HubertConfig", SPEECH, wave),
    "wavlm": ("WavLMForCTC", "WavLMConfig", dict(SPEECH, num_buckets=8, max_bucket_distance=16), wave),
    "audio_spectrogram_transformer": (
        "ASTForAudioClassification", "ASTConfig",
        dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, patch_size=4,
             frequency_stride=4, time_stride=4, max_length=16, num_mel_bins=16),
        lambda: ((torch.randn(2, 16, 16),), {}, None)),
    "clip": ("CLIPModel", "CLIPConfig",
             dict(text_config=dict(SMALL, projection_dim=16, **TOKENS), vision_config=dict(IMAGE, projection_dim=16),
                  projection_dim=16),
             lambda: ((), {"input_ids": ids(), "pixel_values": torch.randn(2, 3, 16, 16)}, None)),
    "siglip": ("SiglipModel", "SiglipConfig", dict(text_config=dict(SMALL, **TOKENS), vision_config=IMAGE),
               lambda: ((), {"input_ids": ids(), "pixel_values": torch.randn(2, 3, 16, 16)}, None)),
    "time_series_transformer": (
        "PatchTSTForPrediction", "PatchTSTConfig",
        dict(num_input_channels=2, context_length=16, prediction_length=4, patch_length=4, patch_stride=4, d_model=16,
             num_hidden_layers=2, num_attention_heads=4, ffn_dim=32, loss="mse"),
        lambda: ((torch.randn(2, 16, 2),), {}, None)),
}
FAMILIES = {"decoder": DECODERS, "mixture of experts": EXPERTS, "state space": STATE_SPACE, "encoder": ENCODERS,
            "encoder and decoder": ENCODER_DECODERS, "vision": VISION, "audio, text and image, series": OTHERS}


def build(entry):
    """The model with random weights and its inputs: module, args, kwargs, dynamic shapes."""
    import transformers

    model_class, config_class, settings, inputs = entry
    config = getattr(transformers, config_class)(**settings)
    model = getattr(transformers, model_class)(config)
    return (model, *inputs())
