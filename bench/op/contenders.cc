#include "bench/op/contenders.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/generated/variable_factories.h>

#include <memory>
#include <vector>

#include "efla/autograd/tensor_view.h"
#include "efla/base/random.h"
#include "efla/ops/delta.h"

namespace efla::bench {
namespace {

using autograd::view_of;

// Calls f with a value of the C++ type of the dtype.
template <class F>
auto with_type(at::ScalarType dtype, F f) {
  if (dtype == at::kDouble) return f(double{});
  return dtype == at::kBFloat16 ? f(bfloat16{}) : f(float{});
}

// Returns ATen's dtype of states for elements of `dtype`.
at::ScalarType state_type(at::ScalarType dtype) { return dtype == at::kDouble ? at::kDouble : at::kFloat; }

at::Tensor normal(at::IntArrayRef extents, double factor, Random& random) {
  const at::Tensor values = at::empty(extents, at::kFloat);
  auto* data = values.data_ptr<float>();
  for (std::int64_t i = 0; i < values.numel(); ++i) data[i] = static_cast<float>(factor * random.normal());
  return values;
}

// The memory for everything that a run writes.
struct Buffers {
  Inputs in;
  at::Tensor o, final_state, chunk_states, dq, dk, dv, dbeta, dg;

  Buffers(const Inputs& inputs, bool backward) : in(inputs) {
    const DeltaShape s = inputs.shape();
    const auto states = inputs.q.options().dtype(state_type(inputs.q.scalar_type()));
    o = at::empty(inputs.v.sizes(), inputs.v.options());
    final_state = at::empty({s.batch, s.heads, s.key_dim, s.value_dim}, states);
    if (!backward) return;
    chunk_states = at::empty({s.batch, s.chunks(), s.heads, s.key_dim, s.value_dim}, states);
    dq = at::empty(inputs.q.sizes(), inputs.q.options());
    dk = at::empty_like(dq);
    dv = at::empty(inputs.v.sizes(), inputs.v.options());
    dbeta = at::empty(inputs.beta.sizes(), inputs.beta.options());
    if (inputs.g.defined()) dg = at::empty_like(inputs.g);
  }
};

template <class T>
DeltaForward<T> forward_of(const Buffers& b) {
  DeltaForward<T> p;
  p.shape = b.in.shape();
  p.rule = b.in.rule();
  p.q = view_of<const T, 4>(b.in.q);
  p.k = view_of<const T, 4>(b.in.k);
  p.v = view_of<const T, 4>(b.in.v);
  p.beta = view_of<const T, 3>(b.in.beta);
  p.g = view_of<const State<T>, 4>(b.in.g);
  p.o = view_of<T, 4>(b.o);
  p.final_state = view_of<State<T>, 4>(b.final_state);
  p.chunk_states = view_of<State<T>, 5>(b.chunk_states);
  return p;
}

template <class T>
void forward_backward(const Buffers& b, const RunOptions& options) {
  const DeltaForward<T> forward = forward_of<T>(b);
  delta_forward(forward, options);
  DeltaBackward<T> p = backward_of(forward);
  p.dout = view_of<const T, 4>(b.in.dout);
  p.dq = view_of<T, 4>(b.dq);
  p.dk = view_of<T, 4>(b.dk);
  p.dv = view_of<T, 4>(b.dv);
  p.dbeta = view_of<T, 3>(b.dbeta);
  p.dg = view_of<State<T>, 4>(b.dg);
  delta_backward(p, options);
}

// The token to decode.
struct Token {
  at::Tensor q, k, v, beta, g, o;

  explicit Token(const Inputs& in)
      : q(in.q.select(1, 0)),
        k(in.k.select(1, 0)),
        v(in.v.select(1, 0)),
        beta(in.beta.select(1, 0)),
        g(in.g.defined() ? in.g.select(1, 0) : at::Tensor()),
        o(at::empty(v.sizes(), v.options())) {}
};

template <class T>
void step(const DeltaShape& shape, const DeltaRule& rule, const Token& token, const at::Tensor& state,
          const RunOptions& options) {
  DeltaStep<T> p;
  p.shape = shape;
  p.shape.tokens = 1;
  p.rule = rule;
  p.q = view_of<const T, 3>(token.q);
  p.k = view_of<const T, 3>(token.k);
  p.v = view_of<const T, 3>(token.v);
  p.beta = view_of<const T, 2>(token.beta);
  p.g = view_of<const State<T>, 3>(token.g);
  p.state = view_of<State<T>, 4>(state);
  p.o = view_of<T, 3>(token.o);
  delta_step(p, options);
}

Outputs gradients(const at::Tensor& o, const at::Tensor& dq, const at::Tensor& dk, const at::Tensor& dv,
                  const at::Tensor& dbeta, const at::Tensor& dg = {}) {
  Outputs all{{"o", o}, {"dq", dq}, {"dk", dk}, {"dv", dv}, {"dbeta", dbeta}};
  if (dg.defined()) all.emplace_back("dg", dg);
  return all;
}

}  // namespace

std::string name_of(Operation operation) {
  switch (operation) {
    case Operation::forward:
      return "forward";
    case Operation::forward_backward:
      return "forward+backward";
    case Operation::decode:
      return "decode";
  }
  return "";
}

DeltaShape Inputs::shape() const { return {q.size(0), q.size(1), q.size(2), v.size(2), q.size(3), v.size(3)}; }

DeltaRule Inputs::rule() const {
  DeltaRule rule;
  if (g.defined()) rule.decay = g.size(3) == 1 ? Decay::scalar : Decay::channel;
  return rule;
}

Inputs Inputs::heads(std::int64_t count) const {
  const auto first = [count](const at::Tensor& x) { return x.defined() ? x.slice(2, 0, count) : x; };
  return {first(q), first(k), first(v), first(beta), first(dout), initial_state.slice(1, 0, count), first(g)};
}

Inputs Inputs::to(at::ScalarType dtype) const {
  const auto state = state_type(dtype);
  return {q.to(dtype),
          k.to(dtype),
          v.to(dtype),
          beta.to(dtype),
          dout.to(dtype),
          initial_state.to(state),
          g.defined() ? g.to(state) : g};
}

Inputs random_inputs(std::int64_t tokens, std::int64_t heads, std::int64_t dim, at::ScalarType dtype, Decay decay) {
  Random random(1);
  const std::vector<std::int64_t> extents{1, tokens, heads, dim};
  Inputs in;
  in.q = normal(extents, 1.0, random);
  in.k = normal(extents, std::pow(static_cast<double>(dim), -0.5), random);
  in.v = normal(extents, 1.0, random);
  in.beta = at::empty({1, tokens, heads}, at::kFloat);
  auto* beta = in.beta.data_ptr<float>();
  for (std::int64_t i = 0; i < in.beta.numel(); ++i) beta[i] = static_cast<float>(random.uniform(0.1, 0.9));
  in.dout = normal(extents, 1.0, random);
  in.initial_state = normal({1, heads, dim, dim}, 1.0, random);
  if (decay != Decay::none) {
    in.g = at::empty({1, tokens, heads, decay == Decay::channel ? dim : 1}, at::kFloat);
    auto* g = in.g.data_ptr<float>();
    for (std::int64_t i = 0; i < in.g.numel(); ++i) g[i] = static_cast<float>(random.uniform(-0.1, 0.0));
  }
  return in.to(dtype);
}

Contender efla_forward(const Inputs& inputs, const std::string& implementation) {
  const auto b = std::make_shared<Buffers>(inputs, false);
  return {[b, implementation] {
            with_type(b->in.q.scalar_type(),
                      [&](auto t) { delta_forward(forward_of<decltype(t)>(*b), {implementation}); });
          },
          [b] {
            return Outputs{{"o", b->o}, {"final_state", b->final_state}};
          }};
}

Contender efla_forward_backward(const Inputs& inputs, const std::string& implementation) {
  const auto b = std::make_shared<Buffers>(inputs, true);
  return {[b, implementation] {
            with_type(b->in.q.scalar_type(), [&](auto t) { forward_backward<decltype(t)>(*b, {implementation}); });
          },
          [b] { return gradients(b->o, b->dq, b->dk, b->dv, b->dbeta, b->dg); }};
}

Contender efla_step(const Inputs& inputs, const std::string& implementation, std::int64_t copies) {
  struct Decode {
    DeltaShape shape;
    DeltaRule rule;
    Token token;
    std::vector<at::Tensor> state;
    std::size_t next = 0, last = 0;
  };
  const auto d = std::make_shared<Decode>(Decode{inputs.shape(), inputs.rule(), Token(inputs), {}});
  d->state = inputs.initial_state.unsqueeze(0).repeat({copies, 1, 1, 1, 1}).unbind(0);  // [B, H, K, V] each
  return {[d, implementation] {
            with_type(d->token.q.scalar_type(), [&](auto t) {
              step<decltype(t)>(d->shape, d->rule, d->token, d->state[d->next], {implementation});
            });
            d->last = d->next;
            d->next = (d->next + 1) % d->state.size();
          },
          [d] {
            return Outputs{{"o", d->token.o}, {"state", d->state[d->last]}};
          }};
}

Contender eager_forward(const Inputs& inputs, const EagerForm& form) {
  const auto result = std::make_shared<std::tuple<at::Tensor, at::Tensor>>();
  return {[=] {
            const at::NoGradGuard no_gradients;
            *result = eager_chunk(inputs.q, inputs.k, inputs.v, inputs.beta, form);
          },
          [=] {
            return Outputs{{"o", std::get<0>(*result)}, {"final_state", std::get<1>(*result)}};
          }};
}

Contender eager_forward_backward(const Inputs& inputs, const EagerForm& form) {
  const auto leaf = [](const at::Tensor& x) { return x.detach().clone().requires_grad_(); };
  const std::vector<at::Tensor> leaves{leaf(inputs.q), leaf(inputs.k), leaf(inputs.v), leaf(inputs.beta)};
  const auto o = std::make_shared<at::Tensor>();
  const auto grads = std::make_shared<std::vector<at::Tensor>>();
  return {[=] {
            const auto out = std::get<0>(eager_chunk(leaves[0], leaves[1], leaves[2], leaves[3], form));
            *grads = torch::autograd::grad({out}, leaves, {inputs.dout});
            *o = out.detach();
          },
          [=] { return gradients(*o, (*grads)[0], (*grads)[1], (*grads)[2], (*grads)[3]); }};
}

Contender eager_decode(const Inputs& inputs) {
  const auto token = std::make_shared<Token>(inputs);
  const auto state = std::make_shared<at::Tensor>(inputs.initial_state.clone());
  return {[=] {
            const at::NoGradGuard no_gradients;
            std::tie(token->o, *state) = eager_step(token->q, token->k, token->v, token->beta, *state);
          },
          [=] {
            return Outputs{{"o", token->o}, {"state", *state}};
          }};
}

Outputs reference(const Inputs& inputs, Operation operation) {
  const Inputs exact = inputs.to(at::kDouble);
  const Contender contender = operation == Operation::forward            ? efla_forward(exact, "ref")
                              : operation == Operation::forward_backward ? efla_forward_backward(exact, "ref")
                                                                         : efla_step(exact, "ref", 1);
  contender.run();
  return contender.outputs();
}

}  // namespace efla::bench
