// Keeps track of the random numbers that a deferred operator gets.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

namespace tessera::deferred {

/// [Note: draws]
///
/// The numbers that a random operator gets depend on all that were drawn before
/// it, and a deferred operator draws none. So each deferred random operator is
/// recorded as a *draw*, which starts where another draw ends or in a state
/// that the generator had. The end of a draw is known once it has run; to run a
/// draw, those before it are run first, each once.
///
/// After a draw is recorded, the generator is moved to a state that stands for
/// its end. The next draw finds that state if nothing has happened in between,
/// or if the user restores it. Any other state is a seed, or follows numbers
/// that were really drawn: the next draw then starts there. If the generator
/// stayed where it was, setting the same seed twice would go unnoticed, and two
/// guards in a row would give the same numbers.
///
/// Not thread safe.
class RngRecord {
 public:
  using Id = size_t;

  RngRecord() = default;
  ~RngRecord();
  RngRecord(const RngRecord&) = delete;
  RngRecord& operator=(const RngRecord&) = delete;

  /// Records that `record` is the next to draw from `generator`, and moves the
  /// generator.
  Id note(at::Generator generator, size_t record);

  /// The draw whose end the generator's state stands for.
  std::optional<Id> stood_for(const at::Generator& generator) const;

  /// The draws that must run before `draw`, in order.
  std::vector<Id> missing_before(Id draw) const;

  std::optional<Id> previous(Id draw) const {
    return draws_[draw].previous;
  }
  size_t record(Id draw) const {
    return draws_[draw].record;
  }
  const at::Generator& generator(Id draw) const {
    return draws_[draw].generator;
  }
  /// Undefined while unknown.
  at::Tensor start(Id draw) const;
  at::Tensor end(Id draw) const {
    return draws_[draw].end;
  }
  void set_end(Id draw, at::Tensor state) {
    draws_[draw].end = std::move(state);
  }

 private:
  struct Draw {
    at::Generator generator;
    bool is_default = false; // the device's own generator
    size_t record = 0;
    std::optional<Id> previous;
    at::Tensor start; // without a previous one
    at::Tensor end;
  };

  std::vector<Draw> draws_;
  std::unordered_map<uint64_t, Id> stand_ins_; // by their fingerprints
};

/// The generator that an operator on `device` uses unless it is given one.
at::Generator default_generator(at::Device device);

at::Tensor state_of(const at::Generator& generator);
void set_state(at::Generator generator, const at::Tensor& state);

/// Puts generators back into the state they had.
class GeneratorStates {
 public:
  GeneratorStates() = default;
  ~GeneratorStates();
  GeneratorStates(const GeneratorStates&) = delete;
  GeneratorStates& operator=(const GeneratorStates&) = delete;

  /// Only the first call for a generator has an effect.
  void keep(const at::Generator& generator);

 private:
  std::vector<std::pair<at::Generator, at::Tensor>> states_;
};

} // namespace tessera::deferred
