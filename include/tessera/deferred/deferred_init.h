#pragma once

#include <tessera/api.h>
#include <tessera/module_ref.h>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>

namespace tessera {

/// While a DeferredInit lives, tensors that this thread makes have no memory:
/// they are on the meta device, and what is done to them is recorded. So a
/// model that does not fit on one device is built by its own constructor,
/// almost at once:
///
///     std::shared_ptr<Model> model;
///     {
///       tessera::DeferredInit deferred;
///       model = std::make_shared<Model>(config);
///     }
///     tessera::materialize(model);
///
/// The values are bit-equal to those of plain construction from the same state
/// of the random generators, whichever tensors are materialized, and in
/// whichever order. A deferred tensor stays one after the guard has ended:
/// initialising it, and converting or moving its module (`to`), is recorded as
/// before, on any thread.
///
/// Reading values of a deferred tensor is an error: item(), data_ptr(), a
/// branch on a value, printing. (Before LibTorch 2.13 the data_ptr() without a
/// type is null instead.) So is torch::save. `torch::tensor({...})` and tensors
/// on the caller's memory are not deferred; if recorded operators read them,
/// they are copied. Loading a file, or set_data(), gives a deferred tensor the
/// memory of another.
///
/// Operators that LibTorch cannot run on the meta device (abs, flip, polar,
/// convolutions) are run once on memory to learn the shape of their result.
/// The device of a deferred tensor is meta; under a guard, a request for meta
/// means the device that the tensor will have, so that options() can be passed
/// on. Autocast and c10::InferenceMode must be off.
///
/// Deferred random operators draw nothing. Each moves its generator to another,
/// unrelated stream instead, by which the next operator knows what came before
/// it: seeds set in between are noticed, and a second guard, or initialisation
/// after this one, continues from there. Seed again if what is drawn after
/// construction has to be as after plain construction.
///
/// Guards nest. A guard must end on the thread that began it.
class TESSERA_API DeferredInit {
 public:
  DeferredInit();
  ~DeferredInit();
  DeferredInit(const DeferredInit&) = delete;
  DeferredInit& operator=(const DeferredInit&) = delete;

 private:
  struct Scope;
  std::unique_ptr<Scope> scope_;
};

/// Whether `tensor` was made under DeferredInit and has no memory yet.
TESSERA_API bool is_deferred(const at::Tensor& tensor);

/// Gives every deferred parameter and buffer of the module its memory and
/// values, on the device that its constructor asked for. The tensors stay the
/// same objects, so all holders see the values; tensors that share memory share
/// it again, and requires_grad is kept. Tensors that are not deferred are left
/// alone, and so are tensors that the module holds without registering them.
///
/// Needs memory for the module, and at any time for what one tensor is computed
/// from. The random generators are unchanged afterwards; no other thread may
/// draw from them meanwhile. Not collective. Throws, with nothing changed, if a
/// tensor has a gradient function. If memory runs out, the call can be
/// repeated.
TESSERA_API void materialize(ModuleRef module);

} // namespace tessera
