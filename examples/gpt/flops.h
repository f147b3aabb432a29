// How much arithmetic a model needs, and how much its devices could do: the
// quotient is the model FLOPS utilization, MFU.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "settings.h"

namespace gpt {

/// Operations for one token of training, forward and backward: 6 per
/// parameter, without the embedding of positions, which is only added, and 12 *
/// layers * width * length for attention, without the saving that a causal mask
/// allows. What is computed again for --recompute does not count.
double flops_per_token(const GptConfig& config, int64_t num_parameters);

/// The kinds of arithmetic that a GPU has a peak for.
enum class Arithmetic { Float32, TensorFloat32, Half }; // bf16 or fp16

/// The peak of a GPU in TFLOPS as its vendor states it, for dense matrices;
/// nothing for a name that is not in the table.
std::optional<double> peak_tflops_of(
    std::string_view gpu_name,
    Arithmetic arithmetic);

/// The name of a GPU, as "NVIDIA H100 80GB HBM3"; empty if the driver does not
/// tell it.
std::string gpu_name(torch::Device device);

/// What --peak-tflops says; else the peak of the GPU in the precision of the
/// settings; nothing if neither is known.
std::optional<double> peak_tflops(
    const Settings& settings,
    torch::Device device);

} // namespace gpt
