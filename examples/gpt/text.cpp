#include "text.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <numbers>
#include <stdexcept>
#include <string>
#include <vector>

namespace gpt {
namespace {

namespace fs = std::filesystem;

std::vector<fs::path> sorted_headers(const fs::path& folder) {
  std::vector<fs::path> paths;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.is_regular_file() && entry.path().extension() == ".h") {
      paths.push_back(entry.path());
    }
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

} // namespace

Text Text::read_headers(const fs::path& folder, int64_t enough) {
  Text text;
  std::string bytes;
  for (const auto& path : sorted_headers(folder)) {
    if (std::ssize(bytes) >= enough) {
      break;
    }
    std::ifstream file(path, std::ios::binary);
    if (!file) {
      throw std::runtime_error("cannot read " + path.string());
    }
    bytes.append(std::istreambuf_iterator<char>(file), {});
    ++text.num_files_;
  }
  if (bytes.empty()) {
    throw std::runtime_error("no *.h with text below " + folder.string());
  }
  text.bytes_ =
      at::from_blob(bytes.data(), {std::ssize(bytes)}, at::kByte).clone();
  return text;
}

Batch Text::windows(int64_t first, int64_t rows, int64_t length) const {
  const int64_t num_starts = num_bytes() - length;
  if (num_starts < 1) {
    throw std::runtime_error(
        "the text has " + std::to_string(num_bytes()) +
        " bytes, too few for windows of " + std::to_string(length));
  }
  std::vector<at::Tensor> windows;
  for (int64_t number = first; number < first + rows; ++number) {
    // Multiples of the golden ratio, less their whole part, spread evenly over
    // 0 to 1 however many there are. No random state, nothing to keep in step.
    const double turns = static_cast<double>(number) / std::numbers::phi;
    const auto start =
        static_cast<int64_t>((turns - std::floor(turns)) * num_starts);
    windows.push_back(bytes_.narrow(0, start, length + 1));
  }
  const auto ids = at::stack(windows).to(at::kLong); // (rows, length + 1)
  return {ids.narrow(1, 0, length), ids.narrow(1, 1, length)};
}

} // namespace gpt
