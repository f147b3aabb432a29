// A Llama in plain LibTorch, for hf_safetensors.cpp. Parameters have Hugging
// Face's names but for "head", which is "lm_head" there, and the "model."
// before the others.
#pragma once

#include <torch/torch.h>

#include <cstdint>

namespace llama {

using torch::Tensor;
namespace nn = torch::nn;

struct Config { // with the names of config.json
  int64_t vocab_size = 256;
  int64_t hidden_size = 128;
  int64_t intermediate_size = 344;
  int64_t num_hidden_layers = 4;
  int64_t num_attention_heads = 8;
  int64_t num_key_value_heads = 4;
  double rms_norm_eps = 1e-5;
  double rope_theta = 10000;
};

inline nn::Linear linear(int64_t in, int64_t out) {
  return nn::Linear(nn::LinearOptions(in, out).bias(false));
}

struct RmsNormImpl : nn::Module {
  RmsNormImpl(int64_t width, double epsilon) : eps(epsilon) {
    weight = register_parameter("weight", torch::ones({width}));
  }
  Tensor forward(const Tensor& x) {
    return weight * x * torch::rsqrt(x.square().mean(-1, true) + eps);
  }
  double eps;
  Tensor weight;
};
TORCH_MODULE(RmsNorm);

/// Rotates pairs of features by an angle that grows with the position.
inline Tensor rotate(
    const Tensor& x,
    double theta) { // (rows, heads, length, width)
  const auto half = x.size(-1) / 2;
  const auto exponents = torch::arange(half, x.options()) / half;
  const auto positions = torch::arange(x.size(-2), x.options());
  const auto angles = torch::outer(positions, torch::pow(theta, -exponents));
  const auto a = x.narrow(-1, 0, half);
  const auto b = x.narrow(-1, half, half);
  return torch::cat(
      {a * angles.cos() - b * angles.sin(),
       b * angles.cos() + a * angles.sin()},
      -1);
}

struct AttentionImpl : nn::Module {
  explicit AttentionImpl(const Config& c)
      : heads(c.num_attention_heads),
        kv_heads(c.num_key_value_heads),
        theta(c.rope_theta) {
    const int64_t width = c.hidden_size;
    const int64_t kv_width = width / heads * kv_heads;
    q_proj = register_module("q_proj", linear(width, width));
    k_proj = register_module("k_proj", linear(width, kv_width));
    v_proj = register_module("v_proj", linear(width, kv_width));
    o_proj = register_module("o_proj", linear(width, width));
  }

  Tensor forward(const Tensor& x) { // (rows, length, width)
    const auto by_head = [](const Tensor& y, int64_t count) {
      return y.unflatten(-1, {count, -1}).transpose(1, 2);
    };
    const auto shared = heads / kv_heads; // heads that share keys and values
    const auto q = rotate(by_head(q_proj(x), heads), theta);
    const auto k = rotate(by_head(k_proj(x), kv_heads), theta);
    const auto v = by_head(v_proj(x), kv_heads);
    const auto attended = torch::scaled_dot_product_attention(
        q,
        k.repeat_interleave(shared, 1),
        v.repeat_interleave(shared, 1),
        /*attn_mask=*/{},
        /*dropout_p=*/0.0,
        /*is_causal=*/true);
    return o_proj(attended.transpose(1, 2).flatten(2));
  }

  int64_t heads;
  int64_t kv_heads;
  double theta;
  nn::Linear q_proj{nullptr}, k_proj{nullptr}, v_proj{nullptr}, o_proj{nullptr};
};
TORCH_MODULE(Attention);

struct MlpImpl : nn::Module {
  explicit MlpImpl(const Config& c) {
    gate_proj = register_module(
        "gate_proj", linear(c.hidden_size, c.intermediate_size));
    up_proj =
        register_module("up_proj", linear(c.hidden_size, c.intermediate_size));
    down_proj = register_module(
        "down_proj", linear(c.intermediate_size, c.hidden_size));
  }
  Tensor forward(const Tensor& x) {
    return down_proj(torch::silu(gate_proj(x)) * up_proj(x));
  }
  nn::Linear gate_proj{nullptr}, up_proj{nullptr}, down_proj{nullptr};
};
TORCH_MODULE(Mlp);

struct LayerImpl : nn::Module {
  explicit LayerImpl(const Config& c) {
    input_layernorm = register_module(
        "input_layernorm", RmsNorm(c.hidden_size, c.rms_norm_eps));
    self_attn = register_module("self_attn", Attention(c));
    post_attention_layernorm = register_module(
        "post_attention_layernorm", RmsNorm(c.hidden_size, c.rms_norm_eps));
    mlp = register_module("mlp", Mlp(c));
  }
  Tensor forward(const Tensor& x) {
    const auto y = x + self_attn(input_layernorm(x));
    return y + mlp(post_attention_layernorm(y));
  }
  RmsNorm input_layernorm{nullptr}, post_attention_layernorm{nullptr};
  Attention self_attn{nullptr};
  Mlp mlp{nullptr};
};
TORCH_MODULE(Layer);

struct LlamaImpl : nn::Module {
  explicit LlamaImpl(const Config& c) {
    embed_tokens = register_module(
        "embed_tokens", nn::Embedding(c.vocab_size, c.hidden_size));
    layers = register_module("layers", nn::ModuleList());
    for (int64_t i = 0; i < c.num_hidden_layers; ++i) {
      layers->push_back(Layer(c));
    }
    norm = register_module("norm", RmsNorm(c.hidden_size, c.rms_norm_eps));
    head = register_module("head", linear(c.hidden_size, c.vocab_size));
  }

  Tensor forward(const Tensor& ids) { // (rows, length), to logits
    auto x = embed_tokens(ids);
    for (const auto& layer : *layers) {
      x = layer->as<Layer>()->forward(x);
    }
    return head(norm(x));
  }

  nn::Embedding embed_tokens{nullptr};
  nn::ModuleList layers{nullptr};
  RmsNorm norm{nullptr};
  nn::Linear head{nullptr};
};
TORCH_MODULE(Llama);

} // namespace llama
