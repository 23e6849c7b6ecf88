// CUDA graphs of a device that is not there: the operations of a capture, which a replay runs.

#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "hollow_memory.h"

namespace {

thread_local bool runs_anyway = false;

struct RunsAnyway {
  bool before = std::exchange(runs_anyway, true);
  ~RunsAnyway() { runs_anyway = before; }
};

bool is_captured() { return graph && !runs_anyway && !exempt; }

std::vector<Tensor> tensors_of(const IValue& value) {
  if (value.isTensor()) return {value.toTensor()};
  if (value.isTensorList()) return value.toTensorVector();
  return {};
}

// A captured operation runs all the same, as its results need memory; what it has written is then
// as it was before.
void capture(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  auto& schema = operation.schema();
  auto last = torch::jit::last(*stack, schema.arguments().size());
  torch::jit::Stack arguments(last.begin(), last.end());
  std::vector<std::pair<c10::Storage, std::string>> before;
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto alias = schema.arguments()[i].alias_info();
    if (!alias || !alias->isWrite()) continue;
    for (auto& tensor : tensors_of(arguments[i])) {
      auto storage = tensor.storage();
      auto bytes = static_cast<const char*>(storage.data());
      before.emplace_back(storage, std::string(bytes, bytes ? storage.nbytes() : 0));
    }
  }
  {
    RunsAnyway runs;
    operation.callBoxed(*stack);
  }
  for (auto& [storage, bytes] : before)
    if (bytes.size()) std::memcpy(storage.mutable_data(), bytes.data(), bytes.size());
  last = torch::jit::last(*stack, schema.returns().size());
  torch::jit::Stack results(last.begin(), last.end());
  graph->push_back([operation, arguments, results] {
    auto again = arguments;
    operation.callBoxed(again);
    for (size_t i = 0; i < results.size(); ++i) {
      auto from = tensors_of(again[i]), to = tensors_of(results[i]);
      for (size_t j = 0; j < to.size(); ++j) {
        auto target = to[j].storage().mutable_data();
        auto source = from[j].storage().data();
        if (source != target) std::memcpy(target, source, to[j].storage().nbytes());
      }
    }
  });
}

}  // namespace

extern "C" {
void hollow_begin_capture() { graph = new Graph; }
Graph* hollow_end_capture() { return std::exchange(graph, nullptr); }
void hollow_forget(Graph* it) { delete it; }
// Whether a launch was captured.
bool hollow_capture(void (*launch)()) {
  if (is_captured()) graph->push_back(launch);
  return is_captured();
}
const char* hollow_replay(Graph* it) {
  static thread_local std::string said;
  at::AutoDispatchBelowADInplaceOrView below;
  try {
    for (auto& each : *it) each();
    return nullptr;
  } catch (const std::exception& error) {
    said = error.what();
    return said.c_str();
  }
}
}
