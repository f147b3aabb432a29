// Computes once what depends on constants alone.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "exported/code.h"
#include "exported/format/program.h"

namespace tessera::exported {

/// [Note: folded constants]
///
/// Position ids, masks of a fixed size and tensors that Python's forward writes
/// out are the same in every run. Steps that make them from constants alone are
/// run before the first forward, and are gone then: the steps that read their
/// results get constants. (Not when the file is loaded: loading a file runs
/// nothing of it.) A step stays
///
/// - if it reads an input, a parameter or a buffer (a buffer may be loaded, or
///   written by the user), or a constant of the program that shares its memory
///   with a buffer or that any program of the file writes to,
/// - if its result, or a view of it, is written in place by any step, or is
///   returned to the caller, who may write to it,
/// - if it draws random numbers, or gives memory that is not filled,
/// - if autocast, which the caller may switch on around forward(), changes its
///   result: each is computed without autocast and with autocast to bfloat16
///   and to float16, and the bits are compared. A graph under an autocast that
///   takes its dtype from the caller stays without a comparison,
/// - if a result is larger than `kMaxFoldedValue`, or the results of all folded
///   steps of a program are larger than `kMaxFolded`: a small program must not
///   hold large tensors. The sizes that the graph has for its tensors tell,
///   before anything is computed; afterwards the tensors themselves do,
/// - if a result is no plain tensor: sparse, or conjugated by a mark alone,
/// - if it throws: it throws again when it is run, and the error has its place.
///
/// Views are known by the schemas of operators. Operators that are made of
/// others may return an argument without saying so, so that their results count
/// as views of all arguments.
///
/// Codes are made for one device and one default dtype, and made again if these
/// change. On the meta device, where deferred weights are, nothing is folded.
inline constexpr uint64_t kMaxFoldedValue = uint64_t{1} << 20;
inline constexpr uint64_t kMaxFolded = uint64_t{16} << 20;

/// What folding reads besides the code.
struct FoldingScope {
  std::shared_ptr<const std::vector<at::Tensor>> weights;
  std::vector<bool> is_fixed; // by weight; see fixed_weights()
  at::Device device{at::kCPU};
};

/// Folds the steps of `code`, which was made of `graph`, and of graphs inside.
void fold_constants(Code& code, const Graph& graph, const FoldingScope& scope);

/// How many steps a run has, those of nested graphs counted once.
size_t num_steps(const Code& code);

} // namespace tessera::exported
