#pragma once

#include <tessera/api.h>

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace tessera::data {

namespace detail {

template <class T>
inline constexpr bool is_sequence = false;
template <class T, class A>
inline constexpr bool is_sequence<std::vector<T, A>> = true;
template <class T, size_t N>
inline constexpr bool is_sequence<std::array<T, N>> = true;

template <class T>
inline constexpr bool is_tuple = false;
template <class... T>
inline constexpr bool is_tuple<std::tuple<T...>> = true;
template <class A, class B>
inline constexpr bool is_tuple<std::pair<A, B>> = true;

/// Stands for any function of a tensor.
struct AnyVisitor {
  void operator()(at::Tensor& tensor) const;
};

template <class T>
concept VisitsItself = requires(T& value, AnyVisitor visitor) {
  for_each_tensor(value, visitor);
};
/// A member that is data, not a function.
template <auto member>
inline constexpr bool is_data =
    std::is_member_object_pointer_v<decltype(member)>;
/// torch::data::TensorExample.
template <class T>
concept HasData = is_data<&T::data>;
/// torch::data::Example.
template <class T>
concept HasDataAndTarget = HasData<T> && is_data<&T::target>;
/// TokenBatch.
template <class T>
concept HasInputsAndTargets = is_data<&T::inputs> && is_data<&T::targets>;

template <class T>
constexpr bool holds_tensors();

template <class T, size_t... I>
constexpr bool tuple_holds_tensors(std::index_sequence<I...>) {
  return (holds_tensors<std::tuple_element_t<I, T>>() && ...);
}

template <class T>
constexpr bool holds_tensors() {
  if constexpr (std::is_same_v<T, at::Tensor> || VisitsItself<T>) {
    return true;
  } else if constexpr (is_sequence<T>) {
    return holds_tensors<typename T::value_type>();
  } else if constexpr (is_tuple<T>) {
    return tuple_holds_tensors<T>(
        std::make_index_sequence<std::tuple_size_v<T>>());
  } else if constexpr (HasDataAndTarget<T>) {
    return holds_tensors<std::remove_cvref_t<decltype(T::data)>>() &&
        holds_tensors<std::remove_cvref_t<decltype(T::target)>>();
  } else if constexpr (HasData<T>) {
    return holds_tensors<std::remove_cvref_t<decltype(T::data)>>();
  } else if constexpr (HasInputsAndTargets<T>) {
    return holds_tensors<std::remove_cvref_t<decltype(T::inputs)>>() &&
        holds_tensors<std::remove_cvref_t<decltype(T::targets)>>();
  } else {
    return false;
  }
}

/// Tensors of the same place in all samples, with a new first dim.
TESSERA_API at::Tensor stack(const std::vector<at::Tensor>& tensors);

} // namespace detail

/// True for a tensor, for vectors, arrays, pairs and tuples of what holds
/// tensors, for structs of LibTorch's examples (`data`, `target`) and
/// TokenBatch, and for any type T for which a function
/// `for_each_tensor(T&, visitor)` is found beside T.
template <class T>
concept HoldsTensors = detail::holds_tensors<T>();

/// Calls `visitor(at::Tensor&)` for each tensor in `value`, in order.
template <HoldsTensors T, class Visitor>
void visit_tensors(T& value, const Visitor& visitor) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    visitor(value);
  } else if constexpr (detail::VisitsItself<T>) {
    for_each_tensor(value, visitor);
  } else if constexpr (detail::is_sequence<T>) {
    for (auto& element : value) {
      visit_tensors(element, visitor);
    }
  } else if constexpr (detail::is_tuple<T>) {
    std::apply(
        [&](auto&... elements) { (visit_tensors(elements, visitor), ...); },
        value);
  } else if constexpr (detail::HasDataAndTarget<T>) {
    visit_tensors(value.data, visitor);
    visit_tensors(value.target, visitor);
  } else if constexpr (detail::HasData<T>) {
    visit_tensors(value.data, visitor);
  } else {
    visit_tensors(value.inputs, visitor);
    visit_tensors(value.targets, visitor);
  }
}

/// Makes a batch of samples: a sample whose tensors have one more dim in front.
/// Members that are not tensors are taken from the first sample.
struct Stack {
  /// There must be at least one sample, and all must have equally many tensors.
  template <HoldsTensors Sample>
  Sample operator()(std::vector<Sample> samples) const {
    std::vector<std::vector<at::Tensor>> places;
    for (Sample& sample : samples) {
      size_t place = 0;
      visit_tensors(sample, [&](at::Tensor& tensor) {
        if (place == places.size()) {
          places.emplace_back();
        }
        places[place++].push_back(tensor);
      });
    }
    Sample batch = std::move(samples.at(0));
    size_t place = 0;
    visit_tensors(batch, [&](at::Tensor& tensor) {
      tensor = detail::stack(places[place++]);
    });
    return batch;
  }
};

} // namespace tessera::data
