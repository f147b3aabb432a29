// Runs the Python that has torch.
#pragma once

#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

namespace tessera::checkpoint {

/// Empty if LibTorch came without Python.
inline std::string python_with_torch() {
  std::string python;
  std::getline(std::ifstream(TESSERA_PYTHON_FILE), python);
  return python;
}

struct PythonOutcome {
  int status = -1;
  std::string output; // of both streams
};

inline PythonOutcome run_python(
    const std::string& python,
    const std::string& script,
    const std::vector<std::string>& args) {
  std::string command = "'" + python + "' -W ignore '" + script + "'";
  for (const auto& arg : args) {
    command += " '" + arg + "'";
  }
  PythonOutcome outcome;
  FILE* pipe = popen((command + " 2>&1").c_str(), "r");
  char buffer[4096];
  while (const size_t count = fread(buffer, 1, sizeof(buffer), pipe)) {
    outcome.output.append(buffer, count);
  }
  outcome.status = pclose(pipe);
  return outcome;
}

} // namespace tessera::checkpoint
