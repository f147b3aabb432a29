#include "train/captured/last_operator.h"

namespace tessera::train {
namespace {

/// Callbacks are plain functions. Autograd's threads call them too.
struct Noted {
  std::mutex mutex;
  std::string name; // guarded by mutex
};
Noted& noted() {
  static auto& instance = *new Noted;
  return instance;
}

} // namespace

LastOperator::LastOperator()
    : handle_(at::addGlobalCallback(at::RecordFunctionCallback(&note).scopes(
          {at::RecordScope::FUNCTION}))) {
  const std::scoped_lock lock(noted().mutex);
  noted().name.clear();
}

LastOperator::~LastOperator() {
  at::removeCallback(handle_);
}

std::string LastOperator::name() const {
  const std::scoped_lock lock(noted().mutex);
  return noted().name;
}

std::unique_ptr<at::ObserverContext> LastOperator::note(
    const at::RecordFunction& function) {
  const std::scoped_lock lock(noted().mutex);
  noted().name = function.name();
  return nullptr;
}

} // namespace tessera::train
