#pragma once

#include <tessera/api.h>
#include <tessera/comm/group.h>

#include <torch/arg.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

/// Options of CsvLog.
struct TESSERA_API CsvLogOptions {
  /// The step that the run starts from. Rows of later steps, which an earlier
  /// attempt left, are removed: this run makes these steps again.
  TORCH_ARG(int64_t, resumed_from) = 0;
  /// The ranks that train; default: the world, or this process alone.
  TORCH_ARG(std::optional<Group>, group) = std::nullopt;
};

/// A table of numbers by step, for spreadsheets and scripts: a header, then one
/// row per step.
///
///   CsvLog table("runs/7/metrics.csv", {"loss", "lr"},
///                CsvLogOptions().resumed_from(step));
///   table.row(step, {loss, lr});
///
///   step,loss,lr
///   1,5.5,1e-04
///
/// Rank 0 of the group writes. The other ranks may make all calls too, but
/// write no file. No function is collective.
///
/// Steps ascend, and no step is there twice, also after a resume. Each row is
/// one write; a row that a kill tore is removed by the next attempt. Numbers
/// are written so that reading gives the same bits; nan, inf and -inf are
/// written as these words, and a value that is not known as an empty field.
///
/// A full disk, or any other error in writing, does not stop training: the log
/// warns once, and nothing more is written.
///
/// Thread safety: one thread at a time.
class TESSERA_API CsvLog {
 public:
  /// Columns are those after "step". A file that has other columns is renamed
  /// to PATH.old (or .old2, ...), with a warning. Throws c10::ValueError if a
  /// name is empty or has a comma, a quote or a line end, or if there are none.
  CsvLog(
      const std::filesystem::path& path,
      const std::vector<std::string>& columns,
      const CsvLogOptions& options = {});
  ~CsvLog();
  CsvLog(const CsvLog&) = delete;
  CsvLog& operator=(const CsvLog&) = delete;

  /// False after such a warning, and on ranks that do not write.
  bool is_writing() const;

  /// One value for each column. Throws c10::ValueError, on every rank that
  /// makes the call, if there are more or fewer, or if the step is not above
  /// the last one.
  void row(int64_t step, const std::vector<std::optional<double>>& values);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

} // namespace tessera
