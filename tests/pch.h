// Precompiled for tests: the whole of LibTorch's front end, and GoogleTest.
#pragma once

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
