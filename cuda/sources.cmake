# The sources of the device operations, for nvcc (cuda/CMakeLists.txt) and for the emulator
# (tests/simt/CMakeLists.txt). Instances are generated (scripts/gen_instances.py); a name says which
# family it is of.
set(here ${CMAKE_CURRENT_LIST_DIR})
set(SPECDEC_CUDA_HOST ${here}/attention/dispatch.cc
                      ${here}/attention/instances/launchers.cc)
set(SPECDEC_CUDA_DECODER ${here}/decoder/gated_activation.cu ${here}/decoder/rms_norm.cu)
set(SPECDEC_CUDA_KV ${here}/kv/append.cu ${here}/kv/compact.cu ${here}/kv/rope_append.cu)
set(SPECDEC_CUDA_LINEAR ${here}/linear/linear.cu ${here}/linear/e4m3_rows.cu
                        ${here}/linear/unpack.cu
                        ${here}/linear/matrix_bf16.cu
                        ${here}/linear/matrix_f16.cu
                        ${here}/linear/packed_bf16.cu ${here}/linear/packed_f16.cu
                        ${here}/linear/packed_wide4_bf16.cu ${here}/linear/packed_wide4_f16.cu
                        ${here}/linear/packed_wide8_bf16.cu ${here}/linear/packed_wide8_f16.cu
                        ${here}/linear/instances/launchers.cu)
file(GLOB SPECDEC_CUDA_LINEAR_HOPPER CONFIGURE_DEPENDS ${here}/linear/instances/hopper_*.cu)
set(SPECDEC_CUDA_ACCEPT ${here}/accept/accept_step.cu ${here}/accept/row_laws.cu
                        ${here}/accept/sample_rows.cu
                        ${here}/accept/synthetic_step.cu)
set(SPECDEC_CUDA_STEP ${here}/step/argmax.cu ${here}/step/build_step.cu ${here}/step/commit_step.cu
                      ${here}/step/draft_step.cu ${here}/step/proposed_drafts.cu ${here}/step/beams.cu
                      ${here}/step/growth.cu)
file(GLOB SPECDEC_CUDA_FINISH CONFIGURE_DEPENDS ${here}/attention/instances/finish_*.cu)
file(GLOB SPECDEC_CUDA_AMPERE CONFIGURE_DEPENDS ${here}/attention/instances/ampere_*.cu)
file(GLOB SPECDEC_CUDA_HOPPER CONFIGURE_DEPENDS ${here}/attention/instances/hopper_*.cu)
# A build for tests may want a few of the attention kernels: an expression of their files' names.
if(SPECDEC_CUDA_ONLY)
  foreach(family FINISH AMPERE HOPPER)
    list(FILTER SPECDEC_CUDA_${family} INCLUDE REGEX "/(${SPECDEC_CUDA_ONLY})[.]cu$")
  endforeach()
endif()
set(SPECDEC_CUDA_ATTENTION ${here}/attention/generic.cu ${here}/attention/plan.cu ${SPECDEC_CUDA_FINISH})
set(SPECDEC_CUDA_KERNELS ${SPECDEC_CUDA_DECODER} ${SPECDEC_CUDA_KV} ${SPECDEC_CUDA_STEP}
                         ${SPECDEC_CUDA_ACCEPT} ${SPECDEC_CUDA_LINEAR}
                         ${SPECDEC_CUDA_LINEAR_HOPPER} ${SPECDEC_CUDA_ATTENTION} ${SPECDEC_CUDA_AMPERE}
                         ${SPECDEC_CUDA_HOPPER})
