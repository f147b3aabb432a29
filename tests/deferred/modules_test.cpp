// Kinds of modules whose deferred construction gives the values that plain
// construction gives, bit for bit.
#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "deferred/support.h"

namespace tessera {
namespace {

using namespace tessera::testing::deferral; // NOLINT: the fixture

TEST_F(DeferredInitTest, LayersMatchPlainConstruction) {
  expect_as_plain([] {
    return torch::nn::Sequential(
               torch::nn::Linear(64, 48),
               torch::nn::ReLU(),
               torch::nn::LayerNorm(torch::nn::LayerNormOptions({48})),
               torch::nn::Dropout(0.3),
               torch::nn::Bilinear(5, 6, 7),
               torch::nn::Conv1d(torch::nn::Conv1dOptions(3, 8, 3)),
               torch::nn::Conv2d(torch::nn::Conv2dOptions(4, 8, 3).groups(2)),
               torch::nn::ConvTranspose2d(
                   torch::nn::ConvTranspose2dOptions(3, 8, 3)),
               torch::nn::BatchNorm2d(8),
               torch::nn::InstanceNorm1d(
                   torch::nn::InstanceNorm1dOptions(4).affine(true)),
               torch::nn::GroupNorm(torch::nn::GroupNormOptions(2, 8)),
               torch::nn::PReLU(),
               torch::nn::Linear(48, 3))
        .ptr();
  });
}

TEST_F(DeferredInitTest, EmbeddingsMatchPlainConstruction) {
  expect_as_plain(with([](Lambda& self) {
    self.child(
        "padded",
        torch::nn::Embedding(
            torch::nn::EmbeddingOptions(10, 16).padding_idx(3)));
    self.child("plain", torch::nn::Embedding(20, 17));
    self.child("bag", torch::nn::EmbeddingBag(11, 5));
  }));
}

TEST_F(DeferredInitTest, RecurrentNetsMatchPlainConstruction) {
  expect_as_plain(with([](Lambda& self) {
    self.child(
        "lstm",
        torch::nn::LSTM(
            torch::nn::LSTMOptions(9, 5).num_layers(2).bidirectional(true)));
    self.child("gru", torch::nn::GRU(5, 3));
    self.child("rnn", torch::nn::RNN(5, 3));
    self.child("cell", torch::nn::LSTMCell(4, 6));
  }));
}

TEST_F(DeferredInitTest, TransformersMatchPlainConstruction) {
  expect_as_plain(with([](Lambda& self) {
    self.child(
        "encoder",
        torch::nn::TransformerEncoder(torch::nn::TransformerEncoderOptions(
            torch::nn::TransformerEncoderLayerOptions(16, 2), 2)));
    self.child(
        "decoder",
        torch::nn::TransformerDecoderLayer(
            torch::nn::TransformerDecoderLayerOptions(16, 2)));
    self.child(
        "attention",
        torch::nn::MultiheadAttention(torch::nn::MultiheadAttentionOptions(8, 2)
                                          .kdim(4)
                                          .vdim(6)
                                          .add_bias_kv(true)));
  }));
}

TEST_F(DeferredInitTest, MaterializedModelsComputeAsPlainOnes) {
  const Make make = with([](Lambda& self) {
    self.child("lstm", torch::nn::LSTM(4, 6));
    self.child("norm", torch::nn::BatchNorm1d(6));
    self.child("head", torch::nn::Linear(6, 2));
  });
  const auto run = [](Module& module) {
    auto children = module.named_children();
    const auto input = torch::arange(24.).reshape({3, 2, 4});
    auto output =
        std::get<0>(children["lstm"]->as<torch::nn::LSTM>()->forward(input));
    output = children["norm"]->as<torch::nn::BatchNorm1d>()->forward(output[0]);
    output = children["head"]->as<torch::nn::Linear>()->forward(output);
    output.square().sum().backward();
    return output;
  };
  const auto plain = make_plain(make);
  const auto module = make_deferred(make);
  materialize(*module);
  EXPECT_TRUE(at::equal(run(*module), run(*plain)));
  const auto expected = plain->parameters();
  const auto parameters = module->parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    EXPECT_TRUE(at::equal(parameters[i].grad(), expected[i].grad()));
  }
}

} // namespace
} // namespace tessera
