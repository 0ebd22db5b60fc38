// PyTorch's operations on the device: PyTorch's own code of CUDA decides shapes and memory, and the CPU's computes.
//
// The kernels in libtorch_cuda are machine code of GPUs. So each operation is called twice. Once as ever, with all that
// it asks of the runtime muted: it allocates its results, as on a GPU. And once, when its stream gets there, as the
// CPU's operation on the same memory. What reaches a stream late therefore computes late, with what memory holds by then.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <unordered_map>
#include <unordered_set>

#include "queues.h"

extern "C" void without_gpu_mute(const char* operation);

namespace {

using at::Tensor;
using c10::IValue;
using Names = std::unordered_set<std::string>;

// They make views or memory without values, or go through the runtime's copies.
const Names AS_THEY_ARE = {"empty", "empty_strided", "_efficientzerotensor", "set_", "resize_", "record_stream",
    "_local_scalar_dense", "_unsafe_view", "_reshape_alias", "_pin_memory", "is_pinned", "is_set_to"};
// The shape of the result depends on values, so the host waits for them.
const Names BY_VALUE = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal",
    "repeat_interleave", "bincount", "nonzero_static", "histc"};
// NVIDIA's libraries would compute them, or decide how: only the shape is asked for.
const Names BY_SHAPE = {"mm", "addmm", "bmm", "baddbmm", "_addmm_activation", "addmv", "mv", "dot", "vdot", "convolution",
    "convolution_backward", "_foreach_norm", "embedding_dense_backward", "sort", "topk", "cumsum"};
// They have no code of CUDA's own: another one takes care of all devices.
const Names ADDED = {"copy_", "convolution", "convolution_backward"};
// They take tensors of the host, too.
const Names TAKE_BOTH = {"copy_", "index", "index_put_", "_index_put_impl_", "index_put"};

struct Original {
  c10::SafeKernelFunction kernel;
  std::string name;  // without overload
  bool is_in_place, answers_host;
};
std::unordered_map<c10::OperatorName, Original>& originals() {
  static auto* all = new std::unordered_map<c10::OperatorName, Original>;
  return *all;
}

thread_local bool is_muted = false;
struct Muted {
  explicit Muted(const char* name) { is_muted = true, without_gpu_mute(name); }
  ~Muted() { is_muted = false, without_gpu_mute(nullptr); }
};

// All tensors in a value, however deep.
template <class Use>
void each_tensor(const IValue& value, Use use) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) use(value.toTensor());
  } else if (value.isList()) {
    for (const IValue& each : value.toListRef()) each_tensor(each, use);
  }
}

// The same value with other tensors.
template <class Change>
IValue with_tensors(const IValue& value, Change change) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(change(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<Tensor> made;
    for (const Tensor& each : value.toTensorVector()) made.push_back(change(each));
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> made;
    for (const auto& each : value.toOptionalTensorVector())
      made.push_back(each && each->defined() ? std::make_optional(change(*each)) : std::nullopt);
    return made;
  }
  return value;
}

// The memory of a device's tensor as a tensor of the CPU. It keeps nothing alive, as a launch does not.
Tensor on_host(const Tensor& tensor) {
  if (!tensor.is_cuda()) {  // a value of the host is taken when the call is made
    Tensor copy = tensor.detach().clone();
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
    return copy;
  }
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  if (!tensor.numel()) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return at::from_blob(tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(), options);
}

// A generator of the CPU that draws the same each time that the device's generator is at the same place.
at::Generator drawn_from(const IValue& given, const c10::Device& device) {
  at::Generator generator = given.isNone() ? at::globalContext().defaultGenerator(device) : given.toGenerator();
  std::lock_guard<std::mutex> lock(generator.mutex());
  uint64_t offset = generator.get_offset();
  generator.set_offset(offset + 4);
  return at::make_generator<at::CPUGeneratorImpl>(generator.current_seed() * 1000003 + offset);
}

std::vector<IValue> arguments_for(const c10::OperatorHandle& op, const std::vector<IValue>& given, c10::DeviceType type,
                                  const c10::Device& device) {
  std::vector<IValue> made;
  for (size_t i = 0; i < given.size(); i++) {
    const auto& argument = op.schema().arguments()[i];
    const IValue& value = given[i];
    bool is_generator = argument.type()->str().find("Generator") != std::string::npos;
    if (value.isDevice()) made.emplace_back(c10::Device(type));
    else if (argument.name() == "pin_memory" && !value.isNone()) made.emplace_back(false);
    else if (is_generator) made.push_back(type == at::kMeta ? IValue() : IValue(drawn_from(value, device)));
    else if (type == at::kMeta)
      made.push_back(with_tensors(value, [](const Tensor& each) {
        Tensor shape = at::empty_strided(each.sizes(), each.strides(), each.options().device(at::kMeta));
        if (each.unsafeGetTensorImpl()->is_wrapped_number()) shape.unsafeGetTensorImpl()->set_wrapped_number(true);
        return shape;
      }));
    else made.push_back(with_tensors(value, on_host));
  }
  return made;
}

c10::Device device_of(const c10::OperatorHandle& op, const Original& original, const std::vector<IValue>& arguments) {
  std::optional<c10::Device> found, host;
  for (const IValue& value : arguments) {
    if (value.isDevice() && value.toDevice().is_cuda()) found = value.toDevice();
    each_tensor(value, [&](const Tensor& each) {
      if (!each.is_cuda()) {
        if (each.dim() && each.numel()) host = each.device();
        return;
      }
      TORCH_CHECK(!found || *found == each.device() || original.name == "copy_",
                  "Expected all tensors to be on the same device, but found at least two devices, ", *found, " and ",
                  each.device(), "! (in ", original.name, ")");
      if (!found) found = each.device();
    });
  }
  TORCH_CHECK(!host || TAKE_BOTH.count(original.name), "Expected all tensors to be on the same device, but found at least "
              "two devices, cuda and cpu! (in ", original.name, ")");
  c10::Device current(at::kCUDA, c10::cuda::current_device());
  return found ? c10::Device(at::kCUDA, found->has_index() ? found->index() : current.index()) : current;
}

void compute(const c10::OperatorHandle& op, std::vector<IValue>& arguments, const std::vector<Tensor>& results) {
  at::AutoDispatchBelowADInplaceOrView guard;
  op.callBoxed(&arguments);
  size_t next = 0;
  for (size_t i = 0; i < arguments.size() && next < results.size(); i++) {
    const auto* alias = op.schema().returns()[i].alias_info();
    if (alias && alias->isWrite()) continue;
    each_tensor(arguments[i], [&](const Tensor& each) {
      const Tensor& into = results[next++];
      TORCH_CHECK(into.sizes() == each.sizes(), "a result of ", into.sizes(), " is of ", each.sizes(), " on the CPU");
      if (into.numel()) into.copy_(each);
    });
  }
}

// The results that are no argument which was written to.
std::vector<Tensor> new_results(const c10::OperatorHandle& op, const std::vector<IValue>& found) {
  std::vector<Tensor> results;
  for (size_t i = 0; i < found.size(); i++) {
    const auto* alias = op.schema().returns()[i].alias_info();
    if (alias && alias->isWrite()) continue;
    each_tensor(found[i], [&](const Tensor& each) { results.push_back(on_host(each)); });
  }
  return results;
}

bool has_mask(const std::vector<IValue>& arguments) {
  bool found = false;
  for (const IValue& value : arguments)
    if (value.isList())
      each_tensor(value, [&](const Tensor& each) { found |= each.scalar_type() == at::kBool || each.scalar_type() == at::kByte; });
  return found;
}

bool is_between_host_and_device(const std::vector<IValue>& arguments) {
  return arguments[0].toTensor().device() != arguments[1].toTensor().device();
}

std::vector<IValue> by_value(const c10::OperatorHandle& op, const std::vector<IValue>& arguments, const c10::Device& device,
                             queues::Stream* stream) {
  TORCH_CHECK(queues::wait({queues::end_of(stream)}), queues::failure());
  std::vector<IValue> found = arguments_for(op, arguments, at::kCPU, device);
  at::AutoDispatchBelowADInplaceOrView guard;
  op.callBoxed(&found);
  for (IValue& value : found)
    value = with_tensors(value, [&](const Tensor& each) {
      Tensor made = at::empty_strided(each.sizes(), each.strides(), each.options().device(device));
      if (each.numel()) on_host(made).copy_(each);
      return made;
    });
  return found;
}

std::vector<IValue> by_shape(const c10::OperatorHandle& op, const std::vector<IValue>& arguments, const c10::Device& device) {
  at::AutoDispatchBelowADInplaceOrView guard;
  std::vector<IValue> found = arguments_for(op, arguments, at::kMeta, device);
  op.callBoxed(&found);
  for (IValue& value : found)
    value = with_tensors(value, [&](const Tensor& each) {
      return at::empty_strided(each.sizes(), each.strides(), each.options().device(device));
    });
  return found;
}

std::vector<IValue> written_arguments(const c10::OperatorHandle& op, const std::vector<IValue>& arguments) {
  std::vector<IValue> found;
  for (size_t i = 0; i < arguments.size(); i++) {
    const auto* alias = op.schema().arguments()[i].alias_info();
    if (alias && alias->isWrite() && found.size() < op.schema().returns().size()) found.push_back(arguments[i]);
  }
  return found;
}

void carry_out(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const Original& original = originals().at(op.operator_name());
  if (is_muted) return original.kernel.callBoxed(op, keys, stack);
  std::vector<IValue> arguments = torch::jit::pop(*stack, op.schema().arguments().size());
  if (original.name == "copy_" && is_between_host_and_device(arguments)) {
    stack->insert(stack->end(), arguments.begin(), arguments.end());
    return original.kernel.callBoxed(op, keys, stack);
  }
  c10::Device device = device_of(op, original, arguments);
  auto* stream = (queues::Stream*)c10::cuda::getCurrentCUDAStream(device.index()).stream();
  if (!stream) stream = queues::default_stream(device.index());
  C10_CUDA_CHECK(cudaGetLastError());  // as PyTorch asks behind each launch
  std::vector<IValue> found;
  if (original.answers_host || (original.name == "index" && has_mask(arguments))) {
    found = by_value(op, arguments, device, stream);
    stack->insert(stack->end(), found.begin(), found.end());
    return;
  }
  if (original.is_in_place) {
    found = written_arguments(op, arguments);
  } else if (BY_SHAPE.count(original.name)) {
    found = written_arguments(op, arguments);
    if (found.empty()) found = by_shape(op, arguments, device);
  } else {
    found = arguments;
    Muted muted(original.name.c_str());
    original.kernel.callBoxed(op, keys, &found);
  }
  auto on_cpu = std::make_shared<std::vector<IValue>>(arguments_for(op, arguments, at::kCPU, device));
  auto results = std::make_shared<std::vector<Tensor>>(new_results(op, found));
  queues::Operation operation;
  operation.name = original.name;
  operation.advance = [op, on_cpu, results] { return compute(op, *on_cpu, *results), true; };
  queues::enqueue(stream, std::move(operation));
  stack->insert(stack->end(), found.begin(), found.end());
}

bool is_to_be_carried_out(const c10::OperatorHandle& op, const std::string& name) {
  bool is_here = op.hasKernelForDispatchKey(c10::DispatchKey::CUDA) || ADDED.count(name);
  if (!is_here || AS_THEY_ARE.count(name) || !op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)) return false;
  for (const auto& each : op.schema().returns())
    if (each.alias_info() && !each.alias_info()->isWrite()) return false;  // a view
  return true;
}

Original original_of(const c10::OperatorHandle& op, const std::string& name) {
  bool is_in_place = false, answers_host = BY_VALUE.count(name);
  for (const auto& each : op.schema().arguments())
    is_in_place |= each.alias_info() && each.alias_info()->isWrite() && !each.is_out();
  for (const auto& each : op.schema().returns()) {
    std::string type = each.type()->str();
    answers_host |= type != "Tensor" && type != "Tensor[]";
  }
  return {op.getComputedKernelForDispatchKey(c10::DispatchKey::CUDA), name, is_in_place, answers_host};
}

struct Silent : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// When this library is loaded: for every thread of the process.
const bool has_registered = [] {
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  Silent silent;  // that a kernel is replaced
  c10::WarningUtils::WarningHandlerGuard guard(&silent);
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    auto op = c10::Dispatcher::singleton().findSchema(name);
    std::string base = name.name.substr(6);
    if (!op || !is_to_be_carried_out(*op, base)) continue;
    originals().emplace(name, original_of(*op, base));
    std::string full = base + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&carry_out>());
  }
  return true;
}();

}  // namespace
