// One visitor of a variant out of several lambdas.
#pragma once

namespace tessera::exported {

template <class... Calls>
struct Overloaded : Calls... {
  using Calls::operator()...;
};
template <class... Calls>
Overloaded(Calls...) -> Overloaded<Calls...>;

} // namespace tessera::exported
