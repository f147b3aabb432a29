#pragma once

#include <tessera/api.h>
#include <tessera/comm/group.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>

namespace tessera {

/// Sums, means, counts, minima and maxima over all ranks, right also where
/// ranks see different numbers of samples:
///
///   Metrics metrics;
///   for (const Batch& batch : my_part_of_the_data) {
///     const auto loss = loss_of(model->forward(batch.input), batch.target);
///     metrics.mean("loss", loss, batch.size());
///     metrics.sum("correct", num_correct);
///     metrics.count("samples", batch.size());
///   }
///   const auto all = metrics.reduce();  // the same on every rank
///   all.at("loss");
///
/// A value is a number, or a tensor with one element. Tensors are added up on
/// their device, in double, and without a graph: nothing waits for a GPU before
/// reduce().
///
/// Ranks need not know the same names: a rank that saw no sample contributes
/// nothing. Mistakes (a tensor of several elements, a name of two kinds) are
/// thrown by reduce(), on every rank. Not thread-safe.
class TESSERA_API Metrics {
 public:
  /// A number, or a tensor with one element.
  class TESSERA_API Value {
   public:
    /// A number of the host.
    Value(double number) : number_(number) {}
    /// A defined tensor of any real dtype and device.
    Value(at::Tensor tensor) : tensor_(std::move(tensor)), is_tensor_(true) {}

   private:
    friend class Metrics;
    double number_ = 0;
    at::Tensor tensor_; // in place of the number
    bool is_tensor_ = false;
  };

  /// The ranks that reduce() combines; default: the world, or this process
  /// alone before init().
  explicit Metrics(const Group& group = Group());
  ~Metrics();
  Metrics(Metrics&&) noexcept;
  Metrics& operator=(Metrics&&) noexcept;

  /// Adds to a mean that weights each value by `count`: a loss that is a mean
  /// over 7 samples counts 7 times. A count of 0 adds nothing, whatever the
  /// value. Not collective, like all functions but reduce().
  void mean(const std::string& name, const Value& value, double count = 1);
  /// Adds to a sum.
  void sum(const std::string& name, const Value& value);
  /// Adds to a count.
  void count(const std::string& name, int64_t number = 1);
  /// Adds a value of which reduce() gives the least, or the greatest. If any
  /// value is NaN, the result is NaN.
  void min(const std::string& name, const Value& value);
  void max(const std::string& name, const Value& value);

  /// The values over all ranks, by name, the same bits on every rank; then
  /// begins anew. A mean of nothing is NaN. One exchange, of some bytes per
  /// name, whatever the names. Collective.
  ///
  /// Throws c10::ValueError on every rank, with nothing left over, if a rank
  /// made a mistake; the message names the metric and the rank.
  std::map<std::string, double> reduce();
  /// Forgets everything.
  void clear();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

} // namespace tessera
