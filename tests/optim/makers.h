// Every optimizer, with options that give it all the state it can have.
#pragma once

#include <tessera/optim/adagrad.h>
#include <tessera/optim/adam.h>
#include <tessera/optim/adamw.h>
#include <tessera/optim/rmsprop.h>
#include <tessera/optim/sgd.h>

#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

namespace tessera::optim {

struct Maker {
  std::string name;
  std::function<std::unique_ptr<Optimizer>(std::vector<at::Tensor>)> make;
};

inline std::ostream& operator<<(std::ostream& out, const Maker& maker) {
  return out << maker.name;
}

template <class O, class Options>
Maker maker(const char* name, const Options& options) {
  return {name, [options](std::vector<at::Tensor> params) {
            return std::make_unique<O>(std::move(params), options);
          }};
}

inline std::vector<Maker> makers() {
  return {
      maker<SGD>("SGD", SGDOptions(0.1).momentum(0.5).weight_decay(0.1)),
      maker<Adam>("Adam", AdamOptions(0.1).amsgrad(true).weight_decay(0.1)),
      maker<AdamW>("AdamW", AdamWOptions(0.1).amsgrad(true)),
      maker<Adagrad>("Adagrad", AdagradOptions(0.1).lr_decay(0.1)),
      maker<RMSprop>(
          "RMSprop", // half has no 1e-8
          RMSpropOptions(0.1).momentum(0.5).centered(true).eps(1e-3))};
}

} // namespace tessera::optim
