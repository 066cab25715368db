// The backend "likenccl": gloo's collectives on the device's memory, on a stream of the group's own, for tensors of the
// device only. Each is over when its call returns; in the order of streams it is over when somebody waits for its work.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include "kernels.h"

// As NCCL's: waiting lets the current stream wait, and not the host.
class DeviceWork final : public c10d::Work {
  std::vector<Tensor> out;
  c10::StreamId stream;
  Clock end;

 public:
  DeviceWork(std::vector<Tensor> out, c10::StreamId stream) : out(std::move(out)), stream(stream), end(order().look(stream)) {}
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { synchronize(); return true; }
  void synchronize() override { order().wait(current_stream, end); }
  std::vector<Tensor> result() override { return out; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{the_device()});
    const auto before = std::exchange(current_stream, stream);
    future->markCompleted(c10::IValue(out));
    current_stream = before;
    return future;
  }
};

class LikeNccl final : public c10d::Backend {
  using Tensors = std::vector<Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  c10::intrusive_ptr<c10d::Backend> gloo;
  c10::StreamId own = Guard::fresh().id();

  static void check(const Tensors& tensors) {
    for (auto& t : tensors) TORCH_CHECK(t.is_cuda(), "No backend type associated with device type cpu");
  }
  static Tensors hosts(const Tensors& tensors) { Tensors all; for (auto& t : tensors) all.push_back(on_host(t)); return all; }

  // Run `collective` on the group's stream, or on the current one if nobody is to wait for it later.
  template <class F> WorkPtr run(const char* name, bool async, const Tensors& in, const Tensors& out, F collective) {
    check(in);
    check(out);
    const auto before = current_stream;
    if (async) { order().wait(own, order().look(before)); current_stream = own; }
    use(std::string("likenccl:") + name, in, out);
    collective();
    auto work = c10::make_intrusive<DeviceWork>(out, current_stream);
    current_stream = before;
    return work;
  }
  // gloo knows no mean: add up with `reduce`, and divide what came out.
  template <class O, class F> void averaged(O options, const Tensors& out, F reduce) {
    const bool mean = options.reduceOp == c10d::ReduceOp::AVG;
    if (mean) options.reduceOp = c10d::ReduceOp::SUM;
    reduce(options);
    if (mean) for (auto t : out) t.div_(getSize());
  }

 public:
  explicit LikeNccl(c10::intrusive_ptr<c10d::Backend> gloo) : Backend(gloo->getRank(), gloo->getSize()), gloo(std::move(gloo)) {}
  const std::string getBackendName() const override { return "likenccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return gloo->getBackendOptions(); }
  void setTimeout(std::chrono::milliseconds t) override { gloo->setTimeout(t); }
  void setSequenceNumberForGroup() override {}

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& o) override {
    return run("all_reduce", o.asyncOp, tensors, tensors, [&] {
      auto h = hosts(tensors);
      averaged(o, h, [&](auto& p) { gloo->allreduce(h, p)->wait(); });
    });
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& o) override {
    return run("all_reduce", o.asyncOp, tensors, tensors, [&] {
      for (auto& t : tensors) {
        Tensors h{on_host(t)};
        averaged(static_cast<const c10d::AllreduceOptions&>(o), h, [&](auto& p) { gloo->allreduce(h, p)->wait(); });
      }
    });
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& o) override {
    return run("broadcast", o.asyncOp, tensors, tensors, [&] { auto h = hosts(tensors); gloo->broadcast(h, o)->wait(); });
  }
  WorkPtr allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    return run("all_gather", o.asyncOp, in, out.at(0), [&] {
      std::vector<Tensors> to{hosts(out.at(0))};
      auto from = hosts(in);
      gloo->allgather(to, from, o)->wait();
    });
  }
  WorkPtr _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& o) override {
    return run("all_gather", o.asyncOp, {in}, {out}, [&] { gather(out, in, o); });
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    return run("all_gather", o.asyncOp, in, out, [&] { for (size_t i = 0; i < in.size(); ++i) gather(out[i], in[i], o); });
  }
  WorkPtr _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& o) override {
    return run("reduce_scatter", o.asyncOp, {in}, {out}, [&] { scatter(out, in, o); });
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& o) override {
    return run("reduce_scatter", o.asyncOp, in, out, [&] { for (size_t i = 0; i < in.size(); ++i) scatter(out[i], in[i], o); });
  }
  WorkPtr barrier(const c10d::BarrierOptions& o) override {
    gloo->barrier(o)->wait();
    wait_for_current("barrier");
    return c10::make_intrusive<DeviceWork>(Tensors{}, current_stream);
  }

  // The end of a group waits for what its device still has to do, and that for the other ranks; aborting waits for nothing.
  void shutdown() override { gloo->barrier(c10d::BarrierOptions())->wait(); }
  void abort() override { gloo->abort(); }

 private:
  void gather(Tensor& out, Tensor& in, const c10d::AllgatherOptions& o) {
    auto to = on_host(out), from = on_host(in);
    gloo->_allgather_base(to, from, o)->wait();
  }
  void scatter(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& o) {
    auto to = on_host(out), from = on_host(in).clone();  // gloo reduces in place
    averaged(o, {to}, [&](auto& p) { gloo->_reduce_scatter_base(to, from, p)->wait(); });
  }
};

// What DDP's reducer measures its first iterations with. CUDA's waits for its events.
struct Timer final : c10d::Timer {
  explicit Timer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    auto from = getTimestamp(start), to = getTimestamp(end);
    if (!from || !to || *to < *from) return std::nullopt;
    wait_for_current("DDP's timer");
    return *to - *from;
  }
};
namespace c10d { C10_REGISTER_TYPED_CLASS(TimerRegistry, CUDA, ::Timer) }
