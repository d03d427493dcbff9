// PyTorch's allocator of CPU tensors, with large blocks from the cache (chunk_cache.h), and all others from the allocator
// that was there before. Bound to the ABI of the PyTorch that it was built for.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <atomic>

#include "cache_blocks.h"

namespace {

c10::Allocator *previous;
std::atomic<bool> serves;

void free_block(void *block)
{
    if (!tierstore_cache_owns(block)) {
        previous->raw_deallocate(block);
        return;
    }
    c10::profiledCPUMemoryReporter().Delete(block);
    tierstore_cache_free(block);
}

struct CachingAllocator final : c10::Allocator {
    c10::DataPtr allocate(size_t num_bytes) override
    {
        void *block = serves.load(std::memory_order_relaxed) ? tierstore_cache_allocate(num_bytes) : nullptr;
        if (!block)
            return previous->allocate(num_bytes);
        c10::profiledCPUMemoryReporter().New(block, num_bytes);
        return {block, block, &free_block, c10::Device(c10::DeviceType::CPU)};
    }

    // Of a small block too: whoever calls `raw_allocate` keeps only its address.
    c10::DeleterFnPtr raw_deleter() const override { return &free_block; }

    bool is_simple_data_ptr(const c10::DataPtr &data) const override
    {
        return data.get() == data.get_context() &&
               (data.get_deleter() == &free_block || data.get_deleter() == previous->raw_deleter());
    }

    void copy_data(void *target, const void *source, size_t num_bytes) const override
    {
        default_copy_data(target, source, num_bytes);
    }
};

}  // namespace

// Has tensors that are made from now on served, or no more; 0, or an errno. Those that live keep the memory that they have.
extern "C" EXPORTED int tierstore_cache_serve(int is_on)
{
    serves = is_on;
    if (previous || !is_on)
        return 0;
    if (int error = tierstore_cache_open())
        return error;
    previous = c10::GetCPUAllocator();
    c10::SetCPUAllocator(new CachingAllocator, 1);  // never deleted: tensors may live until the process ends
    return 0;
}
