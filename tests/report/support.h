// Logs in text, read as files.
#pragma once

#include <nlohmann/json.hpp>

#include <fstream>
#include <iterator>
#include <string>

#include "checkpoint/disk/scratch_folder.h"
#include "report/page.h"
#include "report/run_reader.h"

namespace tessera::report {

using checkpoint::ScratchFolder;

inline void write_file(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

inline std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline Run read_text(const std::string& text) {
  const ScratchFolder folder;
  write_file(folder / "log.jsonl", text);
  return read_run(folder / "log.jsonl");
}

inline nlohmann::json data_of(const Run& run) {
  return nlohmann::json::parse(page_data(run));
}

inline std::string start_line(int attempt = 0, int step = 0, int world = 2) {
  return nlohmann::json{
             {"kind", "start"},
             {"time", 1763200000 + 1000 * attempt},
             {"attempt", attempt},
             {"step", step},
             {"world", world}}
             .dump() +
      "\n";
}

inline std::string step_line(int step, double loss) {
  return nlohmann::json{{"kind", "step"}, {"step", step}, {"loss", loss}}
             .dump() +
      "\n";
}

/// Steps first + 1 to last, each with the loss `offset` + step.
inline std::string step_lines(int first, int last, double offset = 0) {
  std::string text;
  for (int step = first + 1; step <= last; ++step) {
    text += step_line(step, offset + step);
  }
  return text;
}

} // namespace tessera::report
