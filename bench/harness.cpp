#include "harness.h"

#include <ATen/ops/full.h>

#include <malloc.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>

namespace bench {

Arguments::Arguments(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--quick") {
      is_quick_ = true;
    } else if (word.starts_with("-")) {
      std::fprintf(
          stderr, "%s: there is no flag %s, only --quick\n", argv[0], argv[i]);
      std::exit(2);
    } else {
      words_.push_back(word);
    }
  }
}

double median(Samples values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

double milliseconds(const std::function<void()>& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  const std::chrono::duration<double, std::milli> elapsed =
      std::chrono::steady_clock::now() - start;
  return elapsed.count();
}

double milliseconds(
    const tessera::Group& world,
    const std::function<void()>& body) {
  world.barrier();
  return largest(world, milliseconds(body));
}

double largest(const tessera::Group& world, double value) {
  const auto all = at::full({1}, value, at::kDouble);
  world.all_reduce(all, tessera::ReduceOp::Max);
  return all.item<double>();
}

namespace {

/// The most memory this process ever had, or since it was told to forget.
double peak_megabytes() {
  std::ifstream status("/proc/self/status");
  std::string word;
  double kilobytes = 0;
  while (status >> word) {
    if (word == "VmHWM:") {
      status >> kilobytes;
    }
  }
  return kilobytes * 1024 / 1e6;
}

std::string json_of(const Samples& values) {
  std::string text;
  for (const double value : values) {
    char number[32];
    std::snprintf(number, sizeof(number), "%.6g", value);
    text += (text.empty() ? "" : ", ") + std::string(number);
  }
  return "[" + text + "]";
}

} // namespace

double extra_megabytes(const std::function<void()>& body) {
  malloc_trim(0); // so that it takes new memory
  std::ofstream("/proc/self/clear_refs") << "5"; // forget the peak
  const double before = peak_megabytes();
  body();
  return peak_megabytes() - before;
}

void print(const Row& row) {
  std::string peers;
  for (const auto& [name, values] : row.peers) {
    peers += (peers.empty() ? "\"" : ", \"") + name + "\": " + json_of(values);
  }
  const std::string limit =
      row.limit.empty() ? "" : ", \"limit\": " + json_of(row.limit);
  std::printf(
      "{\"name\": \"%s\", \"unit\": \"%s\", \"ours\": %s, \"peers\": {%s}%s}\n",
      row.name.c_str(),
      row.unit,
      json_of(row.ours).c_str(),
      peers.c_str(),
      limit.c_str());
  std::fflush(stdout);
}

} // namespace bench
