"""The options of the tools whose command lines are read; any other one is a slip."""

from __future__ import annotations

_TRTEXEC = """
    --accuracyAlgorithm --accuracyThreshold --adjustForDLA --allocationStrategy
    --allowGPUFallback --allowWeightStreaming --asyncFileReader --atol --avgRuns --avgTiming
    --batch --best --bf16 --buildDLAStandalone --buildOnly --builderOptimizationLevel --calib
    --calibProfile --consistency --continue --cpuOnly --decomposableAttentions --deploy --device
    --directIO --distributiveIndependence --dryRun --dumpKernelText --dumpLayerInfo
    --dumpOptimizationProfile --dumpOutput --dumpProfile --dumpRawBindingsToFile --dumpRefit
    --duration --dynamicPlugins --enablePluginOverride --errorOnTimingCacheMiss
    --excludeLeanRuntime --explicitBatch --explicitPrecision --exportLayerInfo --exportOutput
    --exportProfile --exportTimes --exposeDMA --fp16 --fp8 --getPlanVersionOnly
    --hardwareCompatibilityLevel --help --helpBuildRoute --heuristic --idleTime
    --ignoreParsedPluginLibs --includeDataTransfers --infStreams --inputIOFormats --int8
    --iterations --l2LimitForTiling --layerDeviceTypes --layerOutputTypes --layerPrecisions
    --leanDLLPath --loadEngine --loadInputs --loadRefOutputs --markDebug
    --markUnfusedTensorsAsDebugTensors --maxAuxStreams --maxBatch --maxShapes --maxShapesCalib
    --maxTactics --memPoolSize --minShapes --minShapesCalib --minTiming --model --monitorMemory
    --nativeInstanceNorm --ni --noBuilderCache --noCompilationCache --noCudaGraph
    --noDataTransfers --noSpinWait --noTF32 --nvtxMode --onnx --optShapes --optShapesCalib
    --outputIOFormats --percentile --persistentCacheRatio --pi --pluginInstanceNorm --plugins
    --precisionConstraints --preview --profile --profilingVerbosity --refPair --refit
    --refitFromOnnx --remoteAutoTuningConfig --reportCapabilityDLA --restricted --rtol
    --runtimePlatform --safe --safetyPlugins --saveAllDebugTensors --saveAllEngines
    --saveDebugTensors --saveEngine --separateProfileRun --serialized --setBuildRoute
    --setPluginsToSerialize --shapes --skipInference --sleepTime --sparsity --staticPlugins
    --std --streams --stripAllWeights --stripWeights --stronglyTyped --tacticSources --tempdir
    --tempfileControls --threads --tilingOptimizationLevel --timeDeserialize --timeRefit
    --timingCacheFile --tuneBuildRouteFile --tuneBuildRoutes --tuningCacheFile
    --tuningResultFile --tuningSearch --tuningTimeOut --uff --uffInput --uffNHWC
    --uint8AsymmetricQuantizationDLA --useCudaGraph --useDLACore --useManagedMemory --useProfile
    --useRuntime --useSpinWait --vc --verbose --versionCompatible --warmUp
    --weightStreamingBudget --weightless --workspace
"""
"""Those of trtexec, versions 7 to 11."""
_AUTOCAST = """
    --onnx_path --output_path --low_precision_type -t --calibration_data --nodes_to_exclude
    --op_types_to_exclude --nodes_to_include --op_types_to_include --data_max --init_max
    --init_conversion_max_bytes --max_depth_of_reduction --keep_io_types --log_level --providers
    --trt_plugins --trt_plugins_precision --opset --use_standalone_type_inference
"""
"""Those of ModelOpt's AutoCast."""
_BLOCK_LISTS = """
    --op_block_list --node_block_list --force_fp16_initializers --force_fp16_inputs
    --min_positive_val --max_finite_val --disable_shape_infer --use_symbolic_shape_infer
    --float16 --input --model_type --num_heads --hidden_size --opt_level --use_gpu --provider
    --only_onnxruntime --input_int32 --convert_to_bf16 --use_external_data_format
    --use_multi_head_attention --use_group_norm_channels_first --use_raw_attention_mask
    --no_attention_mask --model_name_or_path -m -p
"""
"""Those of ONNX Runtime's optimizer of transformers and of scripts with its lists."""

KNOWN_OPTIONS = frozenset(f"{_TRTEXEC}{_AUTOCAST}{_BLOCK_LISTS}".split())
"""The options that a list of layers may stand among."""
