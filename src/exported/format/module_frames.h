#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "exported/format/program.h"

namespace tessera::exported {

/// The paths of a program's modules that have commas, semicolons or brackets
/// in them, as keys of a ModuleDict may; the longest first.
class OddPaths {
 public:
  explicit OddPaths(const std::vector<std::string>& paths);

  /// For each character of the text, whether it belongs to one of the paths.
  /// Empty if there are none.
  std::vector<bool> found_in(std::string_view text) const;

 private:
  std::vector<std::string> paths_;
};

/// Reads what a node's "nn_module_stack" says: "KEY,PATH,CLASS" for each
/// module, from the root inwards, with semicolons between them. Throws
/// FormatError.
std::vector<ModuleFrame> read_module_frames(
    std::string_view text,
    const OddPaths& odd_paths);

} // namespace tessera::exported
