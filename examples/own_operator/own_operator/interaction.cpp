// The second-order term of a factorization machine (Rendle 2010, equation 3), as an operator of
// PyTorch: for vectors v_1 ... v_F of a sample, the sum over all pairs i < j of v_i * v_j, element
// by element, in one pass over the vectors:
//
//     out = ((v_1 + ... + v_F)^2 - (v_1^2 + ... + v_F^2)) / 2
//     d out / d v_f = (v_1 + ... + v_F) - v_f

#include <Python.h>

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

namespace {

constexpr int64_t kGrain = 64;  // samples that are worth a thread

at::Tensor interaction(const at::Tensor& vectors) {
  TORCH_CHECK(vectors.dim() == 3, "interaction: vectors must be [B, F, D], got ", vectors.sizes());
  const at::Tensor in = vectors.contiguous();
  const int64_t batch = in.size(0), fields = in.size(1), dim = in.size(2);
  at::Tensor out = at::zeros({batch, dim}, in.options());
  AT_DISPATCH_FLOATING_TYPES(in.scalar_type(), "interaction", [&] {
    const scalar_t* const from = in.const_data_ptr<scalar_t>();
    scalar_t* const to = out.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, batch, kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) {
        for (int64_t d = 0; d < dim; ++d) {
          scalar_t sum = 0, squares = 0;
          for (int64_t f = 0; f < fields; ++f) {
            const scalar_t value = from[(b * fields + f) * dim + d];
            sum += value;
            squares += value * value;
          }
          to[b * dim + d] = (sum * sum - squares) / 2;
        }
      }
    });
  });
  return out;
}

at::Tensor interaction_backward(const at::Tensor& grad, const at::Tensor& vectors) {
  const at::Tensor above = grad.contiguous(), in = vectors.contiguous();
  const int64_t batch = in.size(0), fields = in.size(1), dim = in.size(2);
  at::Tensor out = at::empty_like(in);
  AT_DISPATCH_FLOATING_TYPES(in.scalar_type(), "interaction_backward", [&] {
    const scalar_t* const from = in.const_data_ptr<scalar_t>();
    const scalar_t* const upper = above.const_data_ptr<scalar_t>();
    scalar_t* const to = out.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, batch, kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) {
        for (int64_t d = 0; d < dim; ++d) {
          scalar_t sum = 0;
          for (int64_t f = 0; f < fields; ++f) sum += from[(b * fields + f) * dim + d];
          for (int64_t f = 0; f < fields; ++f) {
            const int64_t at = (b * fields + f) * dim + d;
            to[at] = upper[b * dim + d] * (sum - from[at]);
          }
        }
      }
    });
  });
  return out;
}

}  // namespace

TORCH_LIBRARY(own_operator, m) {
  m.def("interaction(Tensor vectors) -> Tensor");
  m.def("interaction_backward(Tensor grad, Tensor vectors) -> Tensor");
}

TORCH_LIBRARY_IMPL(own_operator, CPU, m) {
  m.impl("interaction", &interaction);
  m.impl("interaction_backward", &interaction_backward);
}

// Operators register themselves when the library is loaded; the module itself is empty. Its name
// is the one that the loader was called with.
#define JOINED(a, b) a##b
#define INIT(name) JOINED(PyInit_, name)
#define QUOTED(name) #name
#define TEXT(name) QUOTED(name)

PyMODINIT_FUNC INIT(TORCH_EXTENSION_NAME)(void) {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, TEXT(TORCH_EXTENSION_NAME), nullptr, -1};
  return PyModule_Create(&module);
}
