//! Experts arrive whole, in order, and no more often than needed.

use super::*;

#[test]
fn experts_come_whole_and_in_order_with_any_number_of_slots() {
    for format in [ExpertFormat::Mxfp4, ExpertFormat::Bf16] {
        for order in [Order::Adjacent, Order::Apart, Order::Torn] {
            let model = Model::new(9, format, order);
            for slots in [1, 2, 3, 5, 9, 100] {
                let store = model.open(slots);
                model.read(&store, &all(9));
                model.read(&store, &[0, 3, 4, 8]);
                model.read(&store, &[]);
                model.read(&store, &all(9));
                let stats = store.stats();
                assert_eq!(stats.hits + stats.misses, 22, "{slots} slots");
                let expert_bytes: u64 = model.manifest.experts.as_ref().unwrap().part_bytes.iter().sum();
                assert!(stats.expert_bytes >= stats.misses * expert_bytes);
            }
        }
    }
}

#[test]
fn piece_sizes_and_modes_do_not_matter() {
    let model = Model::new(4, ExpertFormat::Mxfp4, Order::Adjacent);
    for direct in [true, false] {
        for piece_bytes in [0, 1, 4096, 5000, 1 << 40] {
            for queue_depth in [0, 1, 16] {
                let options = StoreOptions { slots: 2, direct, queue_depth, piece_bytes, verify: false };
                let store = ExpertStore::open(&model.manifest, &[], &options, Interrupt::new()).unwrap();
                model.read(&store, &all(4));
                assert_eq!(store.take_notices(), [""; 0]);
            }
        }
    }
}

#[test]
fn every_expert_is_read_once_while_there_is_room() {
    let model = Model::new(12, ExpertFormat::Mxfp4, Order::Adjacent);
    let store = model.open(24);
    for _ in 0..3 {
        model.read(&store, &all(12));
    }
    let stats = store.stats();
    let payload = 12 * model.manifest.experts.as_ref().unwrap().part_bytes.iter().sum::<u64>();
    assert_eq!((stats.hits, stats.misses, stats.evictions), (24, 12, 0));
    assert_eq!(stats.expert_bytes, payload);
    let asked: u64 = stats.drives.iter().map(|drive| drive.bytes).sum();
    assert!((payload..payload + 12 * 3 * 2 * ALIGN as u64).contains(&asked), "{asked} bytes for {payload}");
}

#[test]
fn a_read_under_way_is_shared() {
    let model = Model::new(6, ExpertFormat::Bf16, Order::Adjacent);
    let store = model.open(6);
    let mut first = store.request(LAYER, &[0, 1, 2, 3]);
    let mut second = store.request(LAYER, &[1, 2, 3, 4]);
    while let Some(expert) = second.next().unwrap() {
        model.check(&expert);
    }
    while let Some(expert) = first.next().unwrap() {
        model.check(&expert);
    }
    assert_eq!((store.stats().hits, store.stats().misses), (3, 5));
}

#[test]
fn two_requests_at_once_get_on_with_a_single_slot() {
    let model = Model::new(6, ExpertFormat::Bf16, Order::Adjacent);
    for slots in [1, 2, 3] {
        let store = model.open(slots);
        let mut requests = [store.request(LAYER, &[0, 1, 2, 3, 4, 5]), store.request(LAYER, &[1, 2, 3, 4, 5])];
        for turn in 0..11 {
            model.check(&requests[turn % 2].next().unwrap().unwrap());
        }
    }
}

#[test]
fn an_expert_in_use_stays_while_others_come_and_go() {
    let model = Model::new(20, ExpertFormat::Mxfp4, Order::Adjacent);
    let store = model.open(2);
    let held = store.request(LAYER, &[7]).next().unwrap().unwrap();
    for _ in 0..5 {
        model.read(&store, &all(7));
        model.check(&held);
    }
    drop(held);
    model.read(&store, &all(20));
}

#[test]
fn a_dropped_request_gives_its_slots_back() {
    let model = Model::new(16, ExpertFormat::Bf16, Order::Adjacent);
    for slots in [1, 2, 7] {
        let store = model.open(slots);
        for taken in 0..16 {
            let mut request = store.request(LAYER, &all(16));
            for _ in 0..taken {
                request.next().unwrap().unwrap();
            }
        }
        model.read(&store, &all(16));
    }
}

#[test]
fn threads_share_few_slots_without_harm() {
    let model = Model::new(10, ExpertFormat::Mxfp4, Order::Torn);
    for slots in [1, 3, 8] {
        let store = model.open(slots);
        std::thread::scope(|scope| {
            for thread in 0..4_u16 {
                let (store, model) = (&store, &model);
                scope.spawn(move || {
                    for round in 0..10_u16 {
                        let experts: Vec<u16> = (0..10).filter(|at| (at * 7 + thread + round) % 3 > 0).collect();
                        model.read(store, &experts);
                    }
                });
            }
        });
    }
}

#[test]
fn experts_and_the_store_can_be_shared_by_threads() {
    fn shareable<T: Send + Sync>() {}
    shareable::<ExpertStore>();
    shareable::<Expert<'_>>();
    shareable::<crate::trunk::Trunk>();
}
