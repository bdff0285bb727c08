from __future__ import annotations

from pathlib import Path

import pytest

from haiprof.trace_analysis.device_time import COMMUNICATION, COMPUTATION, MEMORY, with_kind
from tests.unit.analysis.trace.shared import kernel, trace_of

# HTA classes by name only (D13): these are left out of its tables, or are communication there.
MISNAMED = r"Memcpy|Memset|dma|Sync|^hip"


@pytest.mark.parametrize(
    ("name", "category", "kind"),
    [
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", "kernel", COMMUNICATION),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage)", "kernel", COMMUNICATION),
        ("ncclSymDevKernel_AllReduce_RSxLDMC_AGxSTMC_sum_bf16", "kernel", COMMUNICATION),
        ("void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*"
         ", unsigned long, unsigned int**, unsigned long, unsigned long)", "kernel", COMMUNICATION),
        ("void (anonymous namespace)::multimem_one_shot_all_reduce_kernel<float, 4>", "kernel",
         COMMUNICATION),
        ("void c10d::symmetric_memory::two_shot_all_reduce_kernel_inplace<float, 8>", "kernel",
         COMMUNICATION),
        ("void c10d::intra_node_comm::oneShotAllReduceKernel<8u, true>(...)", "kernel",
         COMMUNICATION),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*, vllm::"
         "RankSignals", "kernel", COMMUNICATION),
        ("void aiter::cross_device_reduce_2stage<__half, 4>", "kernel", COMMUNICATION),
        ("void quickreduce::allreduce_prototype_twoshot<...>", "kernel", COMMUNICATION),
        ("nvshmemi_transfer_rma_nbi", "kernel", COMMUNICATION),
        ("void deep_ep::intranode::dispatch<8, 768, 8192>", "kernel", COMMUNICATION),
        ("mscclpp::allreduce7<__half>", "kernel", COMMUNICATION),
        ("rcclGenericKernel", "kernel", COMMUNICATION),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "kernel",
         COMPUTATION),
        ("triton_red_fused_all_reduce_add_0", "kernel", COMPUTATION),
        ("void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<...>",
         "kernel", COMPUTATION),
        ("hcom_allReduce_", "kernel", COMMUNICATION), ("mcclKernel", "kernel", COMMUNICATION),
        ("ncclSymkDevKernel_AllGather_LL", "kernel", COMMUNICATION),
        ("void cub::DeviceReduceSingleTileKernel", "kernel", COMPUTATION),
        ("void fused_dma_kernel<Sync>", "kernel", COMPUTATION),
        ("triton_poi_fused_Memset_0", "kernel", COMPUTATION),
        ("hipcub_scan", "kernel", COMPUTATION),
        ("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", MEMORY),
        ("hipMemcpyDtoH", "gpu_memcpy", MEMORY),
        ("Memset (Device)", "Memset", MEMORY),
        ("DMA_H2D", "mtia_ccp_events", MEMORY),
        ("dma copy", "mtia_ccp_events", MEMORY),
        ("dmatmul", "mtia_ccp_events", COMPUTATION),
        ("fc_kernel", "mtia_ccp_events", COMPUTATION),
    ],
)  # fmt: skip
def test_kind_goes_by_category_first_and_by_name_second(
    tmp_path: Path, name: str, category: str, kind: str
) -> None:
    trace = trace_of(tmp_path, [kernel(name, 0, 1, category=category)])
    assert with_kind(trace.gpu)["kind"].to_list() == [kind]


def test_a_kernel_with_a_collectives_arguments_is_communication(tmp_path: Path) -> None:
    named = {"Collective name": "allreduce"}
    trace = trace_of(tmp_path, [kernel("own_kernel", 0, 1, **named), kernel("own_kernel", 2, 1)])
    assert with_kind(trace.gpu)["kind"].to_list() == [COMMUNICATION, COMPUTATION]
