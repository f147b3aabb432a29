#pragma once

#include <tessera/api.h>
#include <tessera/engine/transient_buffers.h>
#include <tessera/exported/value.h>
#include <tessera/recompute/recompute.h>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <atomic>
#include <concepts>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace tessera {

namespace exported {
class Model;
} // namespace exported

/// A module of an exported model: it has the parameters, buffers and submodules
/// that Python's module has, under Python's names, but no forward() of its own,
/// since a file has one program for the whole model. It can be sharded, frozen,
/// or looked into, as any torch::nn::Module.
class TESSERA_API ExportedModule : public torch::nn::Module,
                                   public HasTransientBuffers {
 public:
  /// Made by load_exported().
  ExportedModule(std::string path, std::string class_name);

  /// The path in the model: "layers.0.attn"; empty for the model itself.
  const std::string& path() const {
    return path_;
  }
  /// Python's class, "torch.nn.modules.linear.Linear"; empty if no node of the
  /// program comes from the module.
  const std::string& class_name() const {
    return class_name_;
  }
  /// Whether state dicts have a buffer of this module. Buffers that Python
  /// registered with persistent=False are not part of them.
  bool is_persistent(const std::string& buffer) const override {
    return !transient_.contains(buffer);
  }

  /// A program has one mode. So a mode that only a part of the model is in is
  /// an error of the next forward().
  void train(bool on = true) override;

  /// Converts floating parameters and buffers only: an index stays one.
  void to(at::Device device, at::ScalarType dtype, bool non_blocking = false)
      override;
  void to(at::ScalarType dtype, bool non_blocking = false) override;
  void to(at::Device device, bool non_blocking = false) override;

 protected:
  /// Does the work of to() above, for this module and the modules below it.
  virtual void convert(
      std::optional<at::Device> device,
      std::optional<at::ScalarType> dtype,
      bool non_blocking);

 private:
  friend class ExportedImpl;
  friend class exported::Model;

  std::string path_;
  std::string class_name_;
  std::set<std::string> transient_; // buffers
  /// Whether a mode was set since the last forward; the model has it too.
  std::shared_ptr<std::atomic<bool>> mode_was_set_;
};

/// An input that an exported model takes, or a tensor that it returns, as its
/// file describes it.
struct TESSERA_API ExportedSpec {
  /// The size of a dimension: a range, or one number if it was fixed at export.
  struct TESSERA_API Size {
    /// Both ends belong to the range.
    int64_t least = 0;
    int64_t most = std::numeric_limits<int64_t>::max();

    /// One number.
    bool is_fixed() const {
      return least == most;
    }
    /// Whether the model takes this size.
    bool contains(int64_t size) const {
      return size >= least && size <= most;
    }
  };
  /// An input: `input_ids`, `batch['ids']`. A result: the key of a dictionary
  /// ("logits") or the number in a tuple ("0"), with what is below it behind it
  /// ("hidden[0]"); empty if the model returns a tensor.
  std::string name;
  /// Tensor, Int, Float or Bool.
  ExportedValue::Kind kind = ExportedValue::Kind::Tensor;
  at::ScalarType dtype = at::ScalarType::Undefined; // of a tensor
  std::vector<Size> sizes; // of a tensor
};

/// A Python model that torch.export wrote to a file, run by LibTorch: trained,
/// sharded and saved as any module is. See load_exported().
class TESSERA_API ExportedImpl : public ExportedModule,
                                 public RecomputesSubmodules {
 public:
  /// Made by load_exported().
  explicit ExportedImpl(std::unique_ptr<exported::Model> model);
  ~ExportedImpl() override;

  /// Runs the model on tensors, given in the order of the positional arguments
  /// of the export, and returns the tensor that it gives. If it gives something
  /// else, or several, this throws c10::TypeError: use the form below.
  at::Tensor forward(const at::Tensor& input);
  template <std::convertible_to<at::Tensor>... Tensors>
  at::Tensor forward(
      const at::Tensor& first,
      const at::Tensor& second,
      const Tensors&... rest) {
    return run(ExportedArgs{first, second, rest...}).tensor();
  }
  /// Runs the model on any arguments and returns what Python's forward() does.
  /// Arguments whose value was fixed at export (numbers, None, strings) may be
  /// left out. Inputs that were given by name at the export are given by name
  /// here too; one that alone is missing may be the last positional argument.
  ///
  /// Throws, with nothing run, c10::ValueError or c10::TypeError that names the
  /// input if an argument does not fit: its form, dtype, shape, or the range
  /// that its shape was exported for. Where the model is sharded, or this
  /// forward is one of a DistributedDataParallel that will reduce, all ranks
  /// may go on if each of them refused this forward; it takes them up to five
  /// seconds to find out. Otherwise the groups of the model are given up, and
  /// the other ranks throw PeerLostError, with the reason, from the collective
  /// that they wait in or from their next.
  ExportedValue forward(const ExportedArgs& args);

  /// A copy with parameters and buffers of its own.
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<at::Device>& device = std::nullopt) const override;

  /// Chooses the program: a file of tessera_export.py has one for training and
  /// one for evaluation. A file of plain torch.export.save has one, in which
  /// dropout and batch norm do as they did when it was exported: forward()
  /// throws in the other mode, if such operators are in it. It also throws if a
  /// submodule was put into another mode than the model.
  void train(bool on = true) override;

  /// For apply_activation_checkpointing(): each call of these submodules is
  /// recomputed. Buffers that they change, batch norm's for example, are
  /// changed once per step. Throws c10::Error, with nothing changed, if the
  /// nodes of a call do not follow one another in the program, or change a
  /// value in place that was made before them.
  void recompute_submodules(
      const std::vector<const torch::nn::Module*>& submodules,
      const RecomputeOptions& options) override;

  /// The inputs that forward() needs, and the tensors that it returns, in the
  /// program of the present mode. Inputs that were fixed at export are left
  /// out. Throw as forward() does if the file has no program for this mode.
  std::vector<ExportedSpec> inputs() const;
  std::vector<ExportedSpec> results() const;

  /// The module at a path, "layers.0". Throws c10::ValueError, with the nearest
  /// names, if there is none.
  std::shared_ptr<ExportedModule> module_at(const std::string& path);
  /// How many nodes a forward in the current mode runs, those of nested graphs
  /// counted once. What depends on constants alone is computed before the first
  /// forward, or by this call, and is no longer a node.
  size_t num_nodes();
  /// The file it was loaded from.
  const std::filesystem::path& file() const;

 protected:
  void convert(
      std::optional<at::Device> device,
      std::optional<at::ScalarType> dtype,
      bool non_blocking) override;

 private:
  ExportedValue run(const ExportedArgs& args);
  void check_modes();

  std::unique_ptr<exported::Model> model_;
  // Those that were refused, too; see exported/refused_inputs.h.
  std::atomic<int64_t> num_forwards_ = 0;
  std::atomic<int64_t> num_learning_forwards_ = 0; // with gradients, in train()
};

/// The holder of an exported model: a pointer, as every holder of LibTorch.
class TESSERA_API Exported : public torch::nn::ModuleHolder<ExportedImpl> {
 public:
  using torch::nn::ModuleHolder<ExportedImpl>::ModuleHolder;
};

/// Options of load_exported().
struct TESSERA_API ExportedOptions {
  /// Where parameters and buffers go; default: host memory. Devices that the
  /// program names change with it.
  TORCH_ARG(std::optional<at::Device>, device) = std::nullopt;
  /// Make parameters and buffers deferred, as under DeferredInit: fully_shard()
  /// or materialize() reads them, one at a time, so that no rank ever holds the
  /// whole model. If a parameter is contiguous, fully_shard() reads only the
  /// elements that this rank's shards hold. Set it on all ranks or on none. The
  /// file must stay where it is until all parameters are read. A DeferredInit
  /// around load_exported() does the same.
  TORCH_ARG(bool, deferred) = false;
  /// Accept a file whose weights are missing, because it was exported with fake
  /// tensors: they are filled with NaN (integers with 0) until state is loaded.
  TORCH_ARG(bool, allow_missing) = false;
};

/// Loads a model that Python wrote with torch.export.save() or with
/// tessera_export.py:
///
///   auto model = tessera::load_exported("model.pt2");
///   at::Tensor logits = model->forward(ids);
///
/// The module tree, the parameters and the buffers have Python's names; tied
/// parameters are one tensor. It is in training mode, unless the file has a
/// program for evaluation only.
///
/// Each operator of the program is called as Python calls it, so results and
/// gradients are bit-equal to Python's with the same kernels. Python, pickled
/// bytes and code in the file are never run.
///
/// Throws c10::Error on all ranks if the file cannot be read on any of them;
/// c10::NotImplementedError, with all operators that are missing, if this
/// LibTorch cannot run it. Collective over the world, if there is one.
TESSERA_API Exported load_exported(
    const std::filesystem::path& path,
    const ExportedOptions& options = {});

} // namespace tessera
