// What the code in the documents relies on: models that pages mention, and the
// list of blocks. scripts/doc_programs.py makes sources that include this.
#pragma once

#include <tessera/tessera.h>

#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <optional>
#include <regex>
#include <string>
#include <thread>
#include <vector>

namespace tessera::docs {

/// A block of code of the documents.
struct Entry {
  std::string title; // "docs/fsdp.md:12"
  std::string throws; // text of the error it must end with; empty: none
  void (*run)();
};

std::vector<Entry>& entries();

/// Puts a block on the list.
struct Registered {
  Registered(const char* title, const char* throws, void (*run)()) {
    entries().push_back({title, throws, run});
  }
};

struct Config {
  int64_t vocabulary = 32;
  int64_t width = 16;
  int64_t layers = 2;
};

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width)
      : norm(register_module(
            "norm",
            torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        up(register_module("up", torch::nn::Linear(width, 4 * width))),
        down(register_module("down", torch::nn::Linear(4 * width, width))) {}

  torch::Tensor forward(const torch::Tensor& x) {
    return x + down->forward(torch::gelu(up->forward(norm->forward(x))));
  }

  torch::nn::LayerNorm norm;
  torch::nn::Linear up, down;
};
TORCH_MODULE(Block);

/// Blocks in a ModuleList, as most models have them.
struct GPTImpl : torch::nn::Module {
  explicit GPTImpl(const Config& config)
      : embed(register_module(
            "embed",
            torch::nn::Embedding(config.vocabulary, config.width))),
        blocks(register_module("blocks", torch::nn::ModuleList())),
        head(register_module(
            "head",
            torch::nn::Linear(config.width, config.vocabulary))) {
    for (int64_t i = 0; i < config.layers; ++i) {
      blocks->push_back(Block(config.width));
    }
  }

  torch::Tensor forward(const torch::Tensor& tokens) {
    auto x = embed->forward(tokens);
    for (const auto& block : *blocks) {
      x = block->as<Block>()->forward(x);
    }
    return head->forward(x);
  }

  torch::nn::Embedding embed;
  torch::nn::ModuleList blocks;
  torch::nn::Linear head;
};
TORCH_MODULE(GPT);

/// A model that fits on every rank.
struct NetImpl : torch::nn::Module {
  NetImpl()
      : fc(register_module("fc", torch::nn::Linear(16, 32))),
        out(register_module("out", torch::nn::Linear(32, 4))) {}

  torch::Tensor forward(const torch::Tensor& x) {
    return out->forward(torch::relu(fc->forward(x)));
  }

  torch::nn::Linear fc, out;
};
TORCH_MODULE(Net);

torch::Tensor loss_of(const torch::Tensor& output, const torch::Tensor& target);

/// Writes a folder as Hugging Face has them, with the names that
/// docs/interop.md assumes there. Collective.
void write_hugging_face_folder(
    const Group& world,
    const Config& config,
    const std::string& folder);

} // namespace tessera::docs

using namespace tessera::docs;
