{{- /* Context of one revision: its values, name, and what follows from them. */ -}}
{{- define "baton.labels" -}}
app.kubernetes.io/name: baton
app.kubernetes.io/instance: {{ .name }}
app.kubernetes.io/part-of: {{ .Release.Name }}
app.kubernetes.io/version: {{ .tag | quote }}
{{- if not .Values.plain }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}
{{- end -}}

{{- /* Labels that select pods; they never change. */ -}}
{{- define "baton.selector" -}}
{app.kubernetes.io/name: baton, app.kubernetes.io/instance: {{ .name }}, app.kubernetes.io/component: {{ .component }}}
{{- end -}}

{{- define "baton.roleLabel" -}}
{{- if eq .role "node" }}prefill-decode{{ else if and (eq .role "decode") (eq (int .Values.roles.prefill.replicas) 0) }}prefill-decode{{ else }}{{ .role }}{{ end -}}
{{- end -}}

{{- define "baton.image" -}}
image: {{ .Values.image.repository }}:{{ .tag }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end -}}

{{- define "baton.pod" -}}
enableServiceLinks: false   # Services would set BATON_PORT=tcp://… and the like
securityContext: {runAsNonRoot: true, runAsUser: 1000, fsGroup: 1000, seccompProfile: {type: RuntimeDefault}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "baton.mounts" -}}
- {name: fleet, mountPath: /etc/baton, readOnly: true}
{{- if or (eq .Values.mode "cluster") .Values.redis.host }}
- {name: secrets, mountPath: /etc/baton-secrets, readOnly: true}
{{- end }}
{{- if .Values.keys.secret }}
- {name: keys, mountPath: /etc/baton-keys, readOnly: true}
{{- end }}
{{- if .Values.tls.clients }}
- {name: clients-tls, mountPath: /etc/baton-tls/clients, readOnly: true}
{{- end }}
{{- if .Values.tls.fleet }}
- {name: fleet-tls, mountPath: /etc/baton-tls/fleet, readOnly: true}
{{- end }}
{{- if .Values.models.claim }}
- {name: models, mountPath: {{ .Values.models.path }}, readOnly: true}
{{- end }}
{{- end -}}

{{- define "baton.volumes" -}}
- name: fleet
  secret: {secretName: {{ .name }}-fleet}
{{- if or (eq .Values.mode "cluster") .Values.redis.host }}
- name: secrets
  secret:
    secretName: {{ .Values.secret }}
    defaultMode: 0440
    items:
      {{- if eq .Values.mode "cluster" }}
      - {key: fleet-token, path: fleet-token}
      {{- end }}
      {{- if .Values.redis.host }}
      - {key: redis-password, path: redis-password}
      {{- end }}
{{- end }}
{{- if .Values.keys.secret }}
- name: keys
  secret: {secretName: {{ .Values.keys.secret }}, defaultMode: 0440}
{{- end }}
{{- if .Values.tls.clients }}
- name: clients-tls
  secret: {secretName: {{ .Values.tls.clients }}, defaultMode: 0440}
{{- end }}
{{- if .Values.tls.fleet }}
- name: fleet-tls
  secret: {secretName: {{ .Values.tls.fleet }}, defaultMode: 0440}
{{- end }}
{{- if .Values.models.claim }}
- name: models
  persistentVolumeClaim: {claimName: {{ .Values.models.claim }}, readOnly: true}
{{- end }}
{{- end -}}

{{- define "baton.fleetName" -}}
{{ .Values.fleet.fleet | default .Release.Name }}{{ with .revision }}-{{ . }}{{ end }}
{{- end -}}

{{- /* Keys of the fleet file that follow from values. Keys of `fleet` come before them. */ -}}
{{- define "baton.fleet" -}}
{{- $v := .Values }}
{{- $pools := dict }}
{{- $fleet := dict "host" "0.0.0.0" }}
{{- $_ := set $fleet "fleet" (include "baton.fleetName" .) }}
{{- if $v.redis.host }}
{{- $_ := set $fleet "redis" (printf "%s://%s%s:%d/%d?password_file=/etc/baton-secrets/redis-password" (ternary "rediss" "redis" $v.redis.tls) (ternary (printf "%s@" $v.redis.user) "" (ne $v.redis.user "")) $v.redis.host (int $v.redis.port) (int $v.redis.db)) }}
{{- end }}
{{- $clients := dict }}
{{- if $v.keys.secret }}{{ $_ := set $clients "api_keys_file" (printf "/etc/baton-keys/%s" $v.keys.file) }}{{ end }}
{{- if $v.tls.clients }}{{ $_ := set $clients "tls" (dict "certificate" "/etc/baton-tls/clients/tls.crt" "key" "/etc/baton-tls/clients/tls.key") }}{{ end }}
{{- if $v.monitoring.port }}{{ $_ := set $clients "monitoring" (dict "host" "0.0.0.0" "port" $v.monitoring.port) }}{{ end }}
{{- if $clients }}{{ $_ := set $fleet "clients" $clients }}{{ end }}
{{- if eq $v.mode "cluster" }}
{{- if not $v.keda.enabled }}
{{- range $role := list "prefill" "decode" }}
{{- $_ := set $pools $role (int (default (index $v.roles $role).replicas (index $v.roles $role).workers)) }}
{{- end }}
{{- end }}
{{- $_ := set $pools "ports" $v.workerPorts }}
{{- $_ := set $pools "token_file" "/etc/baton-secrets/fleet-token" }}
{{- if $v.tls.fleet }}{{ $_ := set $pools "tls" (dict "certificate" "/etc/baton-tls/fleet/tls.crt" "key" "/etc/baton-tls/fleet/tls.key" "ca" "/etc/baton-tls/fleet/ca.crt") }}{{ end }}
{{- else }}
{{- $servers := ternary (dict "dns" $v.attached.dns) (dict "list" $v.attached.servers) (ne $v.attached.dns "") }}
{{- $_ := set $pools "engine" $v.attached.kind }}
{{- $_ := set $pools (replace "-" "_" $v.attached.kind) (dict "servers" $servers) }}
{{- end }}
{{- $_ := set $fleet "pools" $pools }}
{{- mergeOverwrite $fleet (omit (deepCopy $v.fleet) "fleet") | toYaml }}
{{- end -}}

{{- define "baton.httpPort" -}}{{ .Values.fleet.port | default 8000 }}{{- end -}}

{{- /* Name and number of the port that is scraped. */ -}}
{{- define "baton.scrapePortName" -}}{{ ternary "monitoring" "http" (ne (int .Values.monitoring.port) 0) }}{{- end -}}
{{- define "baton.scrapePort" -}}
{{- if .Values.monitoring.port }}{{ .Values.monitoring.port }}{{ else }}{{ include "baton.httpPort" . }}{{ end -}}
{{- end -}}

{{- /* Deployment of routers, of the process of attached servers, or of an endpoint picker. */ -}}
{{- define "baton.server" -}}
{{- $scheme := ternary "HTTPS" "HTTP" (ne .Values.tls.clients "") }}
{{- $picks := eq .component "picker" }}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ .name }}-{{ .component }}
  labels:
    {{- include "baton.labels" . | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
spec:
  replicas: {{ ternary .Values.routers.replicas 1 (eq .component "router") }}
  {{- if and (eq .component "attached") .Values.redis.host }}
  strategy: {type: Recreate}   # a second process of one fleet on one Redis is refused
  {{- else }}
  strategy:
    rollingUpdate: {maxUnavailable: 0, maxSurge: 1}
  {{- end }}
  selector:
    matchLabels: {{ include "baton.selector" . }}
  template:
    metadata:
      labels:
        {{- include "baton.labels" . | nindent 8 }}
        app.kubernetes.io/component: {{ .component }}
      annotations:
        {{- if not .Values.plain }}
        checksum/fleet: {{ include "baton.fleet" . | sha256sum }}
        {{- end }}
        prometheus.io/scrape: "true"
        prometheus.io/port: {{ include "baton.scrapePort" . | quote }}
    spec:
      {{- include "baton.pod" . | nindent 6 }}
      automountServiceAccountToken: false
      {{- if eq .component "router" }}
      terminationGracePeriodSeconds: 30
      topologySpreadConstraints:
        - maxSkew: 1
          topologyKey: kubernetes.io/hostname
          whenUnsatisfiable: ScheduleAnyway
          labelSelector:
            matchLabels: {{ include "baton.selector" . }}
      {{- else }}
      terminationGracePeriodSeconds: {{ add 30 (.Values.fleet.default_timeout_s | default 600 | int) }}   # streams end with the process
      {{- end }}
      containers:
        - name: {{ .component }}
          {{- include "baton.image" . | nindent 10 }}
          {{- if eq .component "router" }}
          command: [baton, router, /etc/baton/fleet.yaml]
          {{- else if $picks }}
          command: [baton, epp, /etc/baton/fleet.yaml, --grpc-port, "9002"]
          {{- else }}
          command: [baton, up, /etc/baton/fleet.yaml]
          {{- end }}
          env:
            {{- if eq .component "router" }}
            - {name: BATON_FLEET_TOKEN_FILE, value: /etc/baton-secrets/fleet-token}
            {{- end }}
            - {name: BATON_HOME, value: /var/lib/baton}
            - {name: HF_HOME, value: /var/lib/baton/huggingface}
          ports:
            - {name: http, containerPort: {{ include "baton.httpPort" . }}}
            {{- if .Values.monitoring.port }}
            - {name: monitoring, containerPort: {{ .Values.monitoring.port }}}
            {{- end }}
            {{- if $picks }}
            - {name: grpc, containerPort: 9002}
            {{- end }}
          startupProbe:
            httpGet: {path: /health/live, port: http, scheme: {{ $scheme }}}
            periodSeconds: 2
            failureThreshold: {{ ternary 60 300 (eq .component "router") }}
          livenessProbe:      # connections of clients cannot delay it
            httpGet: {path: /health/live, port: {{ include "baton.scrapePortName" . }}, scheme: {{ $scheme }}}
            periodSeconds: 10
            timeoutSeconds: 5
          readinessProbe:     # true if workers respond
            httpGet: {path: {{ ternary "/health/ready" "/health" (eq .component "router") }}, port: http, scheme: {{ $scheme }}}
            periodSeconds: 5
            timeoutSeconds: 5
          lifecycle:          # let the Service remove the pod before the router stops listening
            preStop:
              exec: {command: [sleep, "5"]}
          resources:
            requests: {{ toJson .Values.routers.requests }}
            limits: {{ toJson .Values.routers.limits }}
          securityContext:
            allowPrivilegeEscalation: false
            capabilities: {drop: [ALL]}
          volumeMounts:
            {{- include "baton.mounts" . | nindent 12 }}
            - {name: state, mountPath: /var/lib/baton}
      volumes:
        {{- include "baton.volumes" . | nindent 8 }}
        - name: state
          emptyDir: {}
{{- end -}}

{{- /* Pod template of a node that Ray runs workers on: of a worker group, or of KEDA's Deployment. */ -}}
{{- define "baton.node" -}}
metadata:
  labels:
    {{- include "baton.labels" . | nindent 4 }}
    app.kubernetes.io/component: node
    llm-d.ai/role: {{ include "baton.roleLabel" . }}
spec:
  {{- include "baton.pod" . | nindent 2 }}
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: 60   # time for responses to migrate to other workers
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels: {app.kubernetes.io/name: baton, app.kubernetes.io/instance: {{ .name }}, llm-d.ai/role: {{ include "baton.roleLabel" . }}}
  {{- with .Values.nodeSelector }}
  nodeSelector: {{ toJson . }}
  {{- end }}
  {{- with .Values.tolerations }}
  tolerations: {{ toJson . }}
  {{- end }}
  containers:
    - name: ray-worker
      {{- include "baton.image" . | nindent 6 }}
      command: [bash, -c]
      {{- if eq .role "node" }}
      args:
        - |
          ulimit -n 65536
          until ray health-check --address {{ .name }}-head-svc:6379; do sleep 1; done
          exec ray start --block --address={{ .name }}-head-svc:6379 --node-manager-port=6380 \
            --object-manager-port=6381 --min-worker-port=11000 --max-worker-port=11999
      {{- else }}
      args: ['ulimit -n 65536; eval "exec $KUBERAY_GEN_RAY_START_CMD"']
      {{- end }}
      env:
        {{- include "baton.rayEnv" . | nindent 8 }}
        {{- if eq .role "node" }}
        - {name: RAY_AUTH_MODE, value: token}
        - name: RAY_AUTH_TOKEN
          valueFrom:
            secretKeyRef: {name: {{ .Values.secret }}, key: auth_token}
        {{- end }}
      livenessProbe:    # of the raylet, at its node-manager-port
        tcpSocket: {port: 6380}
        periodSeconds: 10
        failureThreshold: 12
      readinessProbe:
        tcpSocket: {port: 6380}
        periodSeconds: 5
      resources:
        requests: {{ toJson .resources }}
        limits: {{ toJson .resources }}
      securityContext:
        allowPrivilegeEscalation: false
        capabilities: {drop: [ALL]}
      volumeMounts:
        {{- include "baton.mounts" . | nindent 8 }}
        - {name: shm, mountPath: /dev/shm}
  volumes:
    {{- include "baton.volumes" . | nindent 4 }}
    - name: shm       # Ray's object store, which Baton does not use
      emptyDir: {medium: Memory, sizeLimit: {{ .Values.sharedMemory }}}
{{- end -}}

{{- define "baton.rayEnv" -}}
- {name: BATON_FLEET_TOKEN_FILE, value: /etc/baton-secrets/fleet-token}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
- {name: RAY_gcs_rpc_server_reconnect_timeout_s, value: "600"}
- {name: RAY_worker_niceness, value: "0"}
- {name: RAY_health_check_initial_delay_ms, value: "3000"}
- {name: RAY_health_check_period_ms, value: "500"}
- {name: RAY_health_check_timeout_ms, value: "1000"}
- {name: RAY_health_check_failure_threshold, value: "3"}
{{- end -}}

{{- /* YAML of each revision by the template that `template` names; documents are separated. */ -}}
{{- define "baton.each" -}}
{{- $root := .root }}
{{- range $revision, $over := ($root.Values.revisions | default (dict "" (dict))) }}
{{- $values := mergeOverwrite (deepCopy $root.Values) (deepCopy ($over | default dict)) }}
{{- $name := ternary $root.Release.Name (printf "%s-%s" $root.Release.Name $revision) (eq $revision "") }}
{{- $tag := $values.image.tag | default $root.Chart.AppVersion }}
{{- $context := dict "Values" $values "Release" $root.Release "Chart" $root.Chart "revision" $revision "name" $name "tag" $tag }}
{{ include $.template $context }}
{{- end }}
{{- end -}}
