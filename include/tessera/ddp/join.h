#pragma once

#include <tessera/api.h>
#include <tessera/comm/group.h>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <any>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace tessera {

class Join;

/// What a rank does for a Joinable while it has no more inputs.
class TESSERA_API JoinHook {
 public:
  virtual ~JoinHook() = default;
  /// Makes the collectives of one iteration of the ranks that still train.
  virtual void main_hook() {}
  /// Called once on every rank when all ranks are done. `is_last_joiner` means
  /// that this rank trained to the end, so its model is the latest.
  virtual void post_hook(bool is_last_joiner);
};

/// The values that a program passes through Join to all hooks, by name.
using JoinArguments = std::map<std::string, std::any>;

/// Something whose iterations communicate, and that can be joined: ranks with
/// fewer inputs than others continue to take part in its collectives. Once per
/// iteration, before the first collective, a Joinable calls
/// Join::notify_join_context(*this).
class TESSERA_API Joinable {
 public:
  virtual ~Joinable();
  /// What this rank does once it has no more inputs. Called when a Join is
  /// made. Not collective.
  virtual std::unique_ptr<JoinHook> join_hook(
      const JoinArguments& arguments) = 0;
  /// The device of the tensors of Join's own collectives.
  virtual at::Device join_device() const = 0;
  /// The ranks that iterate together.
  virtual Group join_process_group() const = 0;

  /// The Join that this object is in; nullptr if there is none.
  Join* active_join() const {
    return join_;
  }

 private:
  friend class Join;
  Join* join_ = nullptr;
};

/// Options of Join, with Python's names.
struct TESSERA_API JoinOptions {
  /// If off, Join does nothing, for inputs known to be even.
  TORCH_ARG(bool, enable) = true;
  /// All ranks throw when the first one has no more inputs.
  TORCH_ARG(bool, throw_on_early_termination) = false;
  /// Passed to every join_hook().
  TORCH_ARG(JoinArguments, arguments) = {};
};

/// Trains with uneven inputs: ranks that have no more inputs shadow the
/// collectives of those that do, until all are done.
///
///   Join join({&ddp, &zero});
///   for (const auto& input : inputs) { ... }
///   join.close();
///
/// or, the same in one call, Join::run({&ddp, &zero}, [&] { ... }). If the
/// body throws, nothing is closed, as in Python: the other ranks then wait for
/// this one until their timeout, and name it. Joinables must outlive the Join.
class TESSERA_API Join {
 public:
  /// Throws c10::ValueError without a joinable, for joinables of different
  /// groups, and for one that is in a Join already. Not collective.
  explicit Join(std::vector<Joinable*> joinables, JoinOptions options = {});
  /// Without close(), releases the joinables and does not communicate.
  ~Join();
  Join(const Join&) = delete;
  Join& operator=(const Join&) = delete;

  /// This rank has no more inputs. Runs the main hooks in the joinables' order
  /// once for each iteration that another rank still makes, then the post
  /// hooks. Further calls do nothing. Collective in the sense that every rank
  /// calls it when it is done.
  void close();

  /// Runs `body` under a Join, and closes the Join.
  static void run(
      std::vector<Joinable*> joinables,
      const std::function<void()>& body,
      JoinOptions options = {});

  /// Called when a joinable begins an iteration. Communicates only inside a
  /// Join, and there only for the first joinable. With
  /// throw_on_early_termination, throws if a rank has no more inputs.
  static void notify_join_context(Joinable& joinable);

  /// The options as given.
  const JoinOptions& options() const {
    return options_;
  }
  /// True while this rank shadows others in close().
  bool is_shadowing() const {
    return is_shadowing_;
  }

 private:
  void notify();
  double sum_over_ranks(double own) const;
  void let_go();

  std::vector<Joinable*> joinables_;
  std::vector<std::unique_ptr<JoinHook>> hooks_;
  JoinOptions options_;
  Group group_;
  at::Device device_;
  Work notification_;
  bool is_shadowing_ = false;
};

} // namespace tessera
