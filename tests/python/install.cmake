# cmake -DBUILD=… -DPREFIX=… -DPACKAGES=… -DPYTHON=… -P install.cmake: installs the Python package of BUILD under PREFIX and
# uses it from there, with nothing of the checkout on the path.
file(REMOVE_RECURSE ${PREFIX})
execute_process(COMMAND ${CMAKE_COMMAND} --install ${BUILD} --component python --prefix ${PREFIX}
  COMMAND_ERROR_IS_FATAL ANY)
set(ENV{PYTHONPATH} ${PREFIX}/${PACKAGES})
unset(ENV{EFLA_TORCH_LIBRARY})
execute_process(WORKING_DIRECTORY ${PREFIX} COMMAND_ERROR_IS_FATAL ANY COMMAND ${PYTHON} -c [[
import torch
from efla.layers import GatedDeltaNet
from efla.ops.delta_rule import chunk_delta_rule

o, state = chunk_delta_rule(*torch.randn(3, 1, 40, 2, 8), torch.rand(1, 40, 2), output_final_state=True)
assert o.shape == (1, 40, 2, 8) and state.shape == (1, 2, 8, 8), (o.shape, state.shape)
assert GatedDeltaNet(16, head_dim=8, num_heads=2)(torch.randn(1, 5, 16))[0].shape == (1, 5, 16)
]])
