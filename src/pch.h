// Precompiled for the library's own sources: what most of them include.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/nn/module.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>
