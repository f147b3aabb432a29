// Parts of a program that describe values: dtypes, devices, shapes.
#pragma once

#include "exported/format/json_at.h"
#include "exported/format/program.h"

namespace tessera::exported {

// The codes are the file format's own, not those of ATen.
DType read_dtype(const JsonAt& at);
Layout read_layout(const JsonAt& at);
MemoryFormat read_memory_format(const JsonAt& at);

Device read_device(const JsonAt& at);
Expression<int64_t> read_int_expression(const JsonAt& at);
Expression<double> read_float_expression(const JsonAt& at);
Expression<bool> read_bool_expression(const JsonAt& at);
TensorMeta read_tensor_meta(const JsonAt& at);

} // namespace tessera::exported
